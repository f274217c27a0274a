"""A real Slurm on one machine: slurmctld, slurmd and munge of the distribution, a network namespace for each node.

Every node has an address, a host name and an sshd of its own. The controller and the tests stand outside, on a bridge.
Needs root, the packages below and the right to make namespaces; ``missing`` says which is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

NEEDED = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "sshd": "openssh-server",
}
PMIX = "libpmix-dev"  # Slurm's plugin opens libpmix.so by that name, without a version
PMIX_PLACES = ("lib*/*/pmix*/lib/libpmix.so", "lib*/*/libpmix.so", "lib*/libpmix.so")
NETWORK, PREFIX, BRIDGE = "10.89.0", "hvdbs", "hvdbsbr0"
CONTROLLER, NODE, SSH = 16917, 17100, 22
SBIN = "/usr/sbin:/sbin"
START_SECONDS = 30.0
SSH_CLIENT = Path("/etc/ssh/ssh_config.d") / f"{PREFIX}-cluster.conf"


def missing() -> str:
    """Why there can be no cluster here, in a line; empty where there can."""
    absent = [package for program, package in NEEDED.items() if shutil.which(program, path=_path()) is None]
    if not any(found for place in PMIX_PLACES for found in Path("/usr").glob(place)):
        absent.append(PMIX)
    if absent:
        return f"not installed: {' '.join(absent)} (apt-get install --no-install-recommends)"
    if os.geteuid() != 0:
        return "not root: a cluster of network namespaces needs it"
    probe = f"{PREFIX}-probe"
    made = subprocess.run([_program("ip"), "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def _program(name: str) -> str:
    return shutil.which(name, path=_path()) or name


def _run(*command: str | Path, check: bool = True, env: dict[str, str] | None = None) -> str:
    """What a command says, in bounded time."""
    words = [_program(str(command[0])), *map(str, command[1:])]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env=env, stdin=subprocess.DEVNULL
    )
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


class Cluster:
    """``nodes`` nodes of ``cpus`` CPUs and ``gpus`` GPUs (terminals stand for these), in ``folder``; ``with`` stops it.

    RequeueExit is not set: jobs go back into the queue because they ask for it.
    """

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> None:
        self.folder, self.nodes, self.cpus, self.gpus = folder, nodes, cpus, gpus
        self.names = [f"node{at}" for at in range(1, nodes + 1)]
        self.conf = folder / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.conf), "PATH": _path()}

    def __enter__(self) -> Cluster:
        self._lock = (Path("/run") / f"{PREFIX}-cluster.lock").open("a+")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # there is one network of this name
        try:
            self._lock.seek(0)
            left = self._lock.read()
            if left:  # by tests that were killed
                _end_daemons(Path(left))
                shutil.rmtree(left, ignore_errors=True)
            self._take_network_away()
            self._lock.truncate(0)
            self._lock.write(str(self.folder))
            self._lock.flush()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._lock.truncate(0)
        self._lock.close()

    def slurm(self, *command: str | Path, check: bool = True, more: Mapping[str, str] | None = None) -> str:
        """A command of Slurm's, as a user outside of the nodes gives it, with ``more`` variables."""
        return _run(*command, check=check, env={**self.environment, **(more or {})})

    def state(self, job: str) -> str:
        """RUNNING, PENDING and so on; of a job that has left the queue, what its record says."""
        said = self.slurm("scontrol", "show", "job", job, "--oneliner", check=False)
        return next((word.partition("=")[2] for word in said.split() if word.startswith("JobState=")), "GONE")

    def record(self, job: str) -> dict[str, str]:
        said = self.slurm("scontrol", "show", "job", job, "--oneliner", check=False)
        return dict(word.partition("=")[::2] for word in said.split() if "=" in word)

    def log(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted((self.folder / "log").glob("*.log")))

    def _start(self) -> None:
        for name in ("state", "log", "ssh"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._network()
        self._write()
        munge = self.folder / "munge"
        _run("munged", f"--key-file={munge}.key", f"--socket={munge}.sock", f"--pid-file={munge}.pid",
             f"--log-file={self.folder}/log/munged.log", f"--seed-file={munge}.seed")  # fmt: skip
        _run("slurmctld", env=self.environment)
        for name in self.names:
            daemons = f"{_program('sshd')} -f {self.folder}/ssh/{name}.conf; exec {_program('slurmd')} -N {name}"
            inside = f"hostname {name}; {daemons}"
            _run(
                "ip", "netns", "exec", f"{PREFIX}-{name}", "unshare", "--uts", "sh", "-c", inside, env=self.environment
            )
        wait_until(self._idle, "all nodes are idle", START_SECONDS, self.log)

    def _idle(self) -> bool:
        return self.slurm("sinfo", "-h", "-N", "-o", "%t", check=False).split() == ["idle"] * self.nodes

    def _network(self) -> None:
        outside = f"{NETWORK}.254"
        _run("ip", "link", "add", "name", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{outside}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        hosts = ["127.0.0.1 localhost", f"{outside} {socket.gethostname()}"]
        hosts += [f"{NETWORK}.{at} {name}" for at, name in enumerate(self.names, 1)]
        for at, name in enumerate(self.names, 1):
            space, own = f"{PREFIX}-{name}", f"{PREFIX}-v{at}"
            _run("ip", "netns", "add", space)
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text("\n".join([*hosts, ""]))
            _run("ip", "link", "add", own, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", own, "master", BRIDGE, "up")
            _run("ip", "-n", space, "addr", "add", f"{NETWORK}.{at}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", device, "up")
            _run("ip", "-n", space, "route", "add", "default", "via", outside)

    def _write(self) -> None:
        root, ssh = self.folder, self.folder / "ssh"
        key = root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        for name in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / name)
        (ssh / "authorized_keys").write_bytes((ssh / "user.pub").read_bytes())
        Path("/run/sshd").mkdir(exist_ok=True)
        for at, name in enumerate(self.names, 1):
            (root / f"tmp.{name}").mkdir()  # of its own: two daemons' PMIx would meet in one
            lines = f"""Port {SSH}
                ListenAddress {NETWORK}.{at}
                HostKey {ssh}/host
                AuthorizedKeysFile {ssh}/authorized_keys
                StrictModes no
                PasswordAuthentication no
                UsePAM no
                UseDNS no
                PidFile {root}/sshd.{name}.pid
                LogLevel ERROR"""
            (ssh / f"{name}.conf").write_text("\n".join(line.strip() for line in lines.splitlines()) + "\n")
        SSH_CLIENT.parent.mkdir(parents=True, exist_ok=True)
        SSH_CLIENT.write_text(
            f"Host node* {NETWORK}.*\n  IdentityFile {ssh}/user\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        # ip netns exec hides /sys/fs/cgroup from slurmd, which would end if it looked for version 2 there.
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # A character device is all that Slurm asks of a GPU to count it and to set CUDA_VISIBLE_DEVICES.
        (root / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{self.gpus - 1}]\n")
        self.conf.write_text(
            f"""ClusterName=hvdbs
SlurmctldHost={socket.gethostname().split(".")[0]}({NETWORK}.254)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmctldPort={CONTROLLER}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
TmpFS={root}/tmp.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=1
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=300
GresTypes=gpu
"""
            + "".join(
                f"NodeName={name} NodeAddr={NETWORK}.{at} Port={NODE} CPUs={self.cpus} RealMemory=4000 "
                f"Gres=gpu:{self.gpus} State=UNKNOWN\n"
                for at, name in enumerate(self.names, 1)
            )
            + "PartitionName=main Nodes=ALL Default=YES MaxTime=UNLIMITED DefaultTime=10 State=UP\n"
        )

    def stop(self) -> None:
        """Jobs, daemons, namespaces and the bridge; what was never started is passed over."""
        with contextlib.suppress(Exception):
            self.slurm("scancel", "--user=root", check=False)
            wait_until(lambda: not self.slurm("squeue", "-h", check=False).strip(), "the queue is empty", 15)
        _end_daemons(self.folder)
        self._take_network_away()
        SSH_CLIENT.unlink(missing_ok=True)

    def _take_network_away(self) -> None:
        for at, name in enumerate(self.names, 1):
            space = f"{PREFIX}-{name}"
            for pid in _run("ip", "netns", "pids", space, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", space, check=False)
            _run("ip", "link", "del", f"{PREFIX}-v{at}", check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        _run("ip", "link", "del", BRIDGE, check=False)


def _end_daemons(folder: Path) -> None:
    """Those whose files of process ids lie in ``folder``."""
    there = [pid for pid in map(_pid, folder.glob("*.pid")) if pid is not None and str(folder) in _environment(pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(_alive(pid) for pid in there), "daemons have ended", 5)


def _environment(pid: int) -> str:
    """Environment and command line of a process: an id may be another's by now."""
    try:
        return "".join(Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("environ", "cmdline"))
    except OSError:
        return ""


def _pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float, more: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {what}\n{more()}"
        time.sleep(0.1)
