# Runs on every node before anything else: the environment, the same on all of them.
set -euo pipefail

[ -x .venv/bin/python ] || uv venv --python 3.11 .venv
uv pip install --python .venv/bin/python -r requirements.txt
