# Sourced by the scripts: makes .venv where it is absent and puts it first on PATH. PYTHON picks the interpreter.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
install() { # requirement files, pinned by requirements.lock
    [ -z "${SKIP_INSTALL:-}" ] || return 0 # the caller's own environment has it all
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    local stamp=.venv/.installed-$(cat "$@" requirements.lock | sha256sum | cut -c1-16)
    [ ! -e "$stamp" ] || return 0
    local requirements=()
    for file in "$@"; do requirements+=(-r "$file"); done
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${requirements[@]}" -c requirements.lock
    touch "$stamp"
}
export PATH="$PWD/.venv/bin:$PATH"
