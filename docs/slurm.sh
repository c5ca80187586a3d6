#!/bin/bash
# Several machines with Slurm: all but the last one train, the last one samples, with a server on each of its GPUs.
#
#   sbatch --nodes=3 docs/slurm.sh MODEL [OVERRIDES...]      # from the checkout; two machines train, one samples
#
# All machines need one file system for the checkout, the model and outputs/. The weights travel through it (weight_sync=reload). First run
# `uv sync --extra vllm` and `hf download MODEL` where there is internet; where the job has none, export HF_HUB_OFFLINE=1. The run is in
# outputs/slurm_JOBID, with the servers' logs beside it in outputs/slurm_JOBID_servers. A job that Slurm starts again goes on with its newest checkpoint.
# Add what your cluster asks for: --time, --account, --partition.
#SBATCH --job-name=offline-grpo
#SBATCH --output=outputs/slurm_%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail

model=$1
shift
gpus=${SLURM_GPUS_ON_NODE:-8}
run=outputs/slurm_$SLURM_JOB_ID
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${hosts[@]:0:${#hosts[@]}-1}")
sampler=${hosts[-1]}
VLLM_API_KEY=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n') # the servers are open to the network, and need one
export VLLM_API_KEY

urls=() servers=()
for ((i = 0; i < gpus; i++)); do
  urls+=("http://$sampler:$((9001 + i))")
  srun --nodes=1 --ntasks=1 --overlap --gpus="$gpus" --nodelist="$sampler" env CUDA_VISIBLE_DEVICES="$i" \
    uv run --extra vllm -m offline_grpo.engine.serve "$model" \
    --host 0.0.0.0 --port $((9001 + i)) --gpu-memory-utilization 0.9 --log-dir "${run}_servers" &
  servers+=($!)
done
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
for url in "${urls[@]}"; do
  until curl --silent --fail --output /dev/null "$url/health"; do
    for server in "${servers[@]}"; do kill -0 "$server" || exit 1; done # one that could not start has said why
    sleep 5
  done
done

start=("hydra.run.dir=$run") # anew, or from its checkpoints: the servers may have other addresses then, which `resume=auto` takes for another run
compgen -G "$run/checkpoints/iter_*" > /dev/null && start=("resume=$run")
overrides=(
  model=hf "model.train_id=$model" generation.max_new_tokens=1024
  train.precision=bf16 train.lr=1e-6 train.warmup_steps=10 train.batch_size=null train.tokens_per_microbatch=16384
  generation=vllm_server "generation.base_url=[$(IFS=,; echo "${urls[*]}")]" 'generation.api_key=${oc.env:VLLM_API_KEY}'
  weight_sync=reload weight_sync.location=disk mode=async
  train.sharding=fsdp2 train.gradient_checkpointing=true checkpoint.format=sharded
  "${start[@]}"
)
srun --nodes="${#trainers[@]}" --ntasks-per-node=1 --nodelist="$(IFS=,; echo "${trainers[*]}")" \
  uv run --extra vllm torchrun --nnodes "${#trainers[@]}" --nproc_per_node "$gpus" \
  --rdzv_backend c10d --rdzv_endpoint "${trainers[0]}:29500" --rdzv_id "$SLURM_JOB_ID" run_grpo.py "${overrides[@]}" "$@"
