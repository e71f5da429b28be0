# Sourced by the launch scripts: `launch CONFIG [arguments of main.py]` on one GPU, several, or several machines.
#   NUM_GPUS=4 scripts/X.sh             this many processes on this machine (default: all visible GPUs, at least 1)
#   HOSTFILE=hosts scripts/X.sh         `deepspeed --hostfile`, run once, on the first machine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=.. MASTER_PORT=.. scripts/X.sh     torchrun, run on every machine
#   PROGRAM=benchmarks/bench_run.py     started in place of main.py, by the same command
#   DRY_RUN=1                           print the command and stop
# CUDA_VISIBLE_DEVICES is respected as it is.
[ -z "${DRY_RUN:-}" ] || SKIP_INSTALL=1
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
whole_number() { # NAME VALUE
    [[ "$2" =~ ^[1-9][0-9]*$ ]] || { echo "error: $1=$2: set a whole number, at least 1" >&2; exit 2; }
}
refuse_bad_settings() { # CONFIG [arguments of main.py]: what main.py would say of them, before what takes long
    python - --config "$@" <<'PY'
import sys
from config import UserError, load_config
from startup.arguments import train_parser
args = train_parser().parse_args()
try:
    load_config(args.config, args.set)
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
PY
}
launch() {
    whole_number NUM_GPUS "${NUM_GPUS:-1}"
    whole_number NNODES "${NNODES:-1}"
    if [ -n "${HOSTFILE:-}" ] && [ ! -r "$HOSTFILE" ]; then
        echo "error: HOSTFILE=$HOSTFILE: cannot be read; name a file of lines such as 'host slots=8'" >&2
        exit 2
    fi
    local program=${PROGRAM:-main.py}
    if [ ! -r "$program" ]; then
        echo "error: PROGRAM=$program: cannot be read; name a file of this repository" >&2
        exit 2
    fi
    local gpus=${NUM_GPUS:-}
    if [ -z "$gpus" ]; then
        gpus=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))' 2>/dev/null) || {
            echo "error: NUM_GPUS=: without torch the GPUs cannot be counted; set it, e.g. NUM_GPUS=1" >&2
            exit 2
        }
    fi
    local command=(python "$program")
    if [ -n "${HOSTFILE:-}" ]; then
        command=(deepspeed --hostfile "$HOSTFILE" ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} "$program")
    elif [ "${NNODES:-1}" -gt 1 ]; then
        command=(torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:?set NODE_RANK on every machine}"
            --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the first machine}"
            --master-port "${MASTER_PORT:-29500}" --nproc-per-node "$gpus" "$program")
    elif [ "$gpus" -gt 1 ]; then
        command=(torchrun --standalone --nproc-per-node "$gpus" "$program")
    fi
    command+=(--config "$@")
    if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "${command[@]}"; echo; return; fi
    # Else the one line that says what is wrong would stand above a launcher's traceback.
    if [ "${command[0]}" != python ] && [ "$program" = main.py ]; then refuse_bad_settings "$@"; fi
    if [ "${command[0]}" = python ]; then exec "${command[@]}"; fi
    if [ "$gpus" -gt 1 ]; then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; fi # as torchrun would, with a notice
    exec python -m scripts.forward "${command[@]}"
}
