#!/usr/bin/env bash
# Find a Python 3.11 and let tools/environment.py set up the environment; options are passed on to it.
# PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

version() { # prints 3.11.7 or the like; nothing where $1 does not run
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

found=()
for python in ${PYTHON:-python3 python3.11}; do
    case $(version "$python") in
        3.11.*) exec "$python" "$here/environment.py" "$@" ;;
        "") found+=("$python does not run") ;;
        *) found+=("$python is $(version "$python")") ;;
    esac
done
printf -v list '%s, ' "${found[@]}"
echo "setup: Python 3.11 is needed, and ${list%, }: \`apt install python3.11 python3.11-venv python3.11-dev\`," \
    "\`dnf install python3.11-devel\` or \`module load python/3.11\`, or name one by PYTHON=/path/to/python3.11" >&2
exit 1
