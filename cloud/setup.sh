# Runs on every node before anything else: the environment, the same on all of them.
set -euo pipefail

export PATH="$HOME/.local/bin:$PATH" # where SkyPilot puts uv
command -v uv > /dev/null || { echo "cloud/setup.sh needs uv (https://docs.astral.sh/uv)" >&2; exit 1; }
[ -x .venv/bin/python ] || uv venv --python 3.11 .venv
uv pip install --python .venv/bin/python -r requirements.txt
