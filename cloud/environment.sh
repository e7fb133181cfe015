# To be sourced before Ray is started on a node.
source .venv/bin/activate
export RAY_AUTH_MODE=token          # refuses whoever has no token
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0        # Ray's actors are nice to others by default, the coordinator included
: "${RAY_AUTH_TOKEN:?the Ray cluster needs a token}"
# Where Ray looks for it, for shells in which train.py is started.
(umask 077 && mkdir -p ~/.ray && printf %s "$RAY_AUTH_TOKEN" > ~/.ray/auth_token)
[ -z "${HF_TOKEN:-}" ] || (umask 077 && mkdir -p ~/.cache/huggingface && printf %s "$HF_TOKEN" > ~/.cache/huggingface/token)
