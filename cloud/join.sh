# A spot node joins, and stays until the market, the user or the end of the head takes it away.
set -euo pipefail
source cloud/environment.sh

exec ray start --block --address="$HEAD_ADDRESS" --labels="ray.io/market-type=spot"
