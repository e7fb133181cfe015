# The head of Spotlight's own Ray cluster. SkyPilot has one of its own on port 6380: `ray stop` would end both.
set -euo pipefail
source cloud/environment.sh

private_address=$(hostname -I | awk '{print $1}')
echo "$private_address:6379" > ~/spotlight_head
if [ -n "${WANDB_API_KEY:-}" ]; then
  (umask 077 && printf 'machine api.wandb.ai\n  login user\n  password %s\n' "$WANDB_API_KEY" > ~/.netrc)
fi
exec ray start --head --block --node-ip-address="$private_address" --port=6379 --include-dashboard=false \
  --labels="ray.io/market-type=on-demand"
