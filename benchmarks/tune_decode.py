"""scratch: time kernels alone and whole steps, over variants."""
import sys, time, json, dataclasses, os, math
sys.path.insert(0, os.getcwd())
import torch, triton
from modeling.fused import DecodeWeights, LayerWeights
from modeling.decode_stack import DecodeStack
from modeling.decode_tiles import Tiles, product_tiles
from rollout.sampling_kernel import HeadSampler
T0 = time.time()
OUT = os.environ.get("OUT", "/tmp")
SH = {"0.6B": dict(L=28, H=16, G=8, D=128, hid=1024, inner=3072), "4B": dict(L=36, H=32, G=8, D=128, hid=2560, inner=9728)}
V = 151936
dev = "cuda"
def weights(s):
    hid, inner, H, G, D = s["hid"], s["inner"], s["H"], s["G"], s["D"]
    per = (H + 2 * G) * D * hid + H * D * hid + 3 * hid * inner + 2 * hid + 2 * D
    flat = torch.empty(V * hid + s["L"] * per + hid, dtype=torch.bfloat16, device=dev).normal_(0, 0.02)
    at = 0
    def take(*shape, norm=False):
        nonlocal at
        n = math.prod(shape); t = flat[at:at + n].view(*shape); at += n
        if norm: t.fill_(1)
        return t
    emb = take(V, hid); layers = []
    for _ in range(s["L"]):
        q, k, v = take(H * D, hid), take(G * D, hid), take(G * D, hid)
        o = take(hid, H * D); qn, kn = take(D, norm=True), take(D, norm=True)
        g, u, d = take(inner, hid), take(inner, hid), take(hid, inner)
        i, p = take(hid, norm=True), take(hid, norm=True)
        layers.append(LayerWeights(i, q, k, v, None, (qn, kn), o, p, g, u, d))
    return DecodeWeights(tuple(layers), emb, take(hid, norm=True), emb, H, G, D, D ** -0.5, 1e-6)
def rotary(C, D):
    f = torch.arange(C, device=dev)[:, None].float() / (1e6 ** (torch.arange(0, D, 2, device=dev).float() / D))
    e = torch.cat((f, f), -1)
    return e.cos().bfloat16(), e.sin().bfloat16()
def make(w, L, rows, ctx, P=16, overlap=True):
    pages_row = math.ceil((ctx + 64) / P)
    n = rows * pages_row + 1
    kv = torch.empty(L, 2, n, w.kv_heads, P, w.head_size, dtype=torch.bfloat16, device=dev)
    for l in range(L): kv[l].normal_()
    table = torch.zeros(rows + 1, pages_row, dtype=torch.int32, device=dev)
    table[1:] = torch.randperm(n - 1, device=dev)[:rows * pages_row].view(rows, pages_row).int() + 1
    st = DecodeStack(w, kv, table, torch.zeros(rows + 1, dtype=torch.int32, device=dev), rotary(ctx + 64, w.head_size), rows, overlap=overlap)
    st.step[0] = torch.randint(0, V, (rows,)); st.step[1] = ctx - 1; st.step[4] = torch.arange(1, rows + 1)
    st.step[5] = table[1:, (ctx - 1) // P]; st.step[2] = torch.randint(-2**31, 2**31 - 1, (rows,), dtype=torch.int32)
    return st
def graph_ms(fn, n=20):
    fn(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    for _ in range(3): g.replay()
    ts = []
    for _ in range(3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n // 3 + 1): g.replay()
        b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) / (n // 3 + 1))
    return sorted(ts)[1]
res = []
def rec(**k):
    res.append(k); print(" ".join(f"{a}={b:.2f}" if isinstance(b, float) else f"{a}={b}" for a, b in k.items()), flush=True)
    json.dump(res, open(f"{OUT}/tune.json", "w"))
