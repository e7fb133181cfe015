# Starts so many spot nodes, each a managed job: bash cloud/spot_nodes.sh 4
set -euo pipefail

count=${1:?how many spot nodes}
head_address=$(ssh spotlight cat spotlight_head)
for number in $(seq 1 "$count"); do
  sky jobs launch --yes --detach-run --name "spotlight-spot-$number" \
    --env HEAD_ADDRESS="$head_address" --secret RAY_AUTH_TOKEN --secret HF_TOKEN cloud/spot.yaml
done
