# Sourced by the scripts: makes .venv where it is absent and puts it first on PATH. PYTHON picks the interpreter.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
install() { # requirement files, pinned by requirements/lock.txt
    [ -z "${SKIP_INSTALL:-}" ] || return 0 # the caller's own environment has it all
    if ! [ -x .venv/bin/python ]; then
        local python=${PYTHON:-python3}
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "error: PYTHON=$python: is $("$python" --version 2>&1), and 3.11 or later is needed; name one" >&2
            exit 2
        }
        "$python" -m venv .venv
    fi
    local stamp=.venv/.installed-$(cat "$@" requirements/lock.txt | sha256sum | cut -c1-16)
    [ ! -e "$stamp" ] || return 0
    local requirements=()
    for file in "$@"; do requirements+=(-r "$file"); done
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${requirements[@]}" -c requirements/lock.txt
    touch "$stamp"
}
unset PYTHONSAFEPATH # or the scripts that these start would not find their package
export PATH="$PWD/.venv/bin:$PATH"
