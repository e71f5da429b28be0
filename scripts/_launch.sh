# Sourced by the launch scripts: `launch CONFIG [arguments of main.py]` on one GPU, several, or several machines.
#   NUM_GPUS=4 scripts/X.sh             this many processes on this machine (default: all visible GPUs, at least 1)
#   HOSTFILE=hosts scripts/X.sh         `deepspeed --hostfile`, run once, on the first machine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=.. MASTER_PORT=.. scripts/X.sh     torchrun, run on every machine
#   DRY_RUN=1                           print the command and stop
# CUDA_VISIBLE_DEVICES is respected as it is.
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
launch() {
    local gpus=${NUM_GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
    local command=(python main.py)
    if [ -n "${HOSTFILE:-}" ]; then
        command=(deepspeed --hostfile "$HOSTFILE" ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} main.py)
    elif [ "${NNODES:-1}" -gt 1 ]; then
        command=(torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:?set NODE_RANK on every machine}"
            --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the first machine}"
            --master-port "${MASTER_PORT:-29500}" --nproc-per-node "$gpus" main.py)
    elif [ "$gpus" -gt 1 ]; then
        command=(torchrun --standalone --nproc-per-node "$gpus" main.py)
    fi
    command+=(--config "$@")
    if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "${command[@]}"; echo; return; fi
    exec "${command[@]}"
}
