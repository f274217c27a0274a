"""The command itself. An older Python has to get as far as the line that says so, hence no newer syntax here."""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_OLD = """  FAIL  Python              {}, {}: hvdbs is for 3.11
                         -> python3.11 (module load python/3.11), then make setup PYTHON=python3.11
"""


def main(argv: "Sequence[str] | None" = None) -> int:  # in quotes, for an older Python
    """As command.main, where this Python can read it."""
    if sys.version_info < (3, 11):  # noqa: UP036  # whoever has no other yet is whom it is for
        sys.stdout.write(_OLD.format(sys.version.split()[0], sys.executable))
        return 1
    from hvdbs import entry
    from hvdbs.doctor import command

    return entry.run(lambda: command.main(argv))


if __name__ == "__main__":
    sys.exit(main())
