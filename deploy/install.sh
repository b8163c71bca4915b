#!/bin/sh
# Installs the wheel that lies in a folder, with JAX and other packages: install.sh FOLDER [PACKAGE...]
set -eu
wheel=$(echo "$1"/fairway-*.whl)
shift
test -f "$wheel" || { echo "there is no single wheel of Fairway; \`make wheel\` builds it" >&2; exit 1; }
python3 -m pip install --no-cache-dir --disable-pip-version-check "${wheel}[jax]" "$@"
fairway --version
