"""From an allocation of Slurm, a host file or a list of hosts to a running job: ``python -m hvdbs.launch``.

Nothing here imports torch, so that it answers at once on a login node.
"""
