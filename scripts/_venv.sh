# Makes the virtual environment of the project, when it is missing or stale.
#
# Sourced by the other scripts. Afterwards $VENV/bin holds python and everything in
# pyproject.toml, the project itself included (editable).
#
#   PYTHON  interpreter to make it with   (default: python3)
#   VENV    where                         (default: .venv in the project's root)
#
# Stale means that pyproject.toml, the interpreter or the place of either folder has changed
# since. The stamp that records them is written last, so an interrupted installation is
# started again.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
VENV=${VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV # the scripts change folders

ensure_venv() {
  local wanted stamp=$VENV/.stamp
  if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "rrfp_jax needs Python 3.11 or newer; '$PYTHON' is $("$PYTHON" --version 2>/dev/null || echo not there). Set PYTHON." >&2
    return 1
  fi
  wanted=$(
    "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
    cksum <"$ROOT/pyproject.toml"
    echo "$ROOT $VENV" # both are written into the environment
  )
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return 0
  fi
  if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
    echo "VENV must be a virtual environment or a folder to make, got $VENV; it holds other files." >&2
    return 1
  fi
  echo "installing rrfp_jax and what it needs into $VENV (once; takes about a minute) ..." >&2
  rm -f "$stamp"
  "$PYTHON" -m venv --clear "$VENV" || return 1
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable "$ROOT[dev]" || return 1
  printf '%s\n' "$wanted" >"$stamp"
}
