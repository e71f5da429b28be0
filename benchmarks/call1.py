from tune_decode import *
def copy_bw():
    a = torch.empty(1 << 30, dtype=torch.float32, device=dev); b = torch.empty_like(a)
    ms = graph_ms(lambda: b.copy_(a), 9); rec(copy_TBps=2 * a.numel() * 4 / ms / 1e9)
copy_bw()
def step_fn(st, hs, rows):
    def f():
        st.launch(rows); hs.launch(rows)
    return f
def attn(name, w, L, rows, ctx, quick=False):
    us_floor = rows * ctx * w.kv_heads * w.head_size * 4 / 4.27e12 * 1e6
    for P in (16, 64):
        st = make(w, L, rows, ctx, P)
        cfgs = [(64, 4, 5, None, 2, 128), (64, 4, 7, None, 2, 128), (64, 4, 5, 168, 2, 128), (64, 4, 5, 168, 3, 128), (64, 4, 5, 168, 6, 128), (64, 4, 7, None, 4, 128), (64, 4, 3, 128, 4, 128), (128, 8, 5, None, 2, 128), (64, 4, 5, 168, 3, 0), (32, 2, 7, 168, 6, 128)]
        if P == 64: cfgs = [(64, 4, 5, 168, 3, 128), (64, 4, 7, None, 2, 128), (128, 4, 3, None, 3, 128)]
        for bn, wp, stg, reg, tgt, pre in cfgs:
            st.attention_tile, st.attention_warps, st.attention_stages, st.attention_registers = bn, wp, stg, reg
            st.attention_prefetch = pre; st.target = 132 * tgt; st.items = 1024 if rows > 64 else 512
            st._allocate(rows) if False else None
            st.plan = torch.zeros(3, st.items, dtype=torch.int32, device=dev)
            st.item_parts = torch.zeros(st.items, w.heads, w.head_size, device=dev); st.item_sums = torch.zeros(st.items, w.kv_heads, 2, st.group, device=dev)
            try:
                st._open(rows); torch.cuda.synchronize()
                ms = graph_ms(lambda: [st._attend(rows, i, l, 2) for i, l in enumerate(w.layers[:L])])
                rec(k="attn", m=name, rows=rows, ctx=ctx, P=P, bn=bn, W=wp, st=stg, reg=reg, tgt=tgt, pre=pre, us=ms / L * 1e3, share=us_floor / (ms / L * 1e3))
            except Exception as e: print("FAIL", bn, wp, stg, reg, repr(e)[:200])
        del st
def prod(name, w, rows):
    L = len(w.layers); st = make(w, L, rows, 64)
    it = 2; hid, inner = st.hidden, st.inner
    g = {"qkv": (st.width, hid), "o": (hid, w.heads * w.head_size), "gate_up": (2 * inner, hid), "down": (hid, inner), "head": (V, hid)}
    hs = HeadSampler(st, 1.0, rows); hs.parts = torch.empty(5 * 2400 * max(rows, 128) , device=dev)
    fns = {"qkv": lambda: [st._qkv(rows, l) for l in w.layers], "o": lambda: [st._add("o", rows, st.attended, l.o, l.post_norm) for l in w.layers],
           "gate_up": lambda: [st._gate(rows, l) for l in w.layers], "down": lambda: [st._add("down", rows, st.gated, l.down, l.post_norm) for l in w.layers], "head": lambda: [hs.launch(rows) for _ in range(4)]}
    for kind, (n, k) in g.items():
        base = product_tiles(kind, rows, n, k, it)
        var = [base, dataclasses.replace(base, prefetch=0)]
        R = dataclasses.replace
        if kind in ("qkv", "o", "down"):
            for s in (1, 2, 3, 4, 6, 8):
                if s != base.splits: var.append(R(base, splits=s))
            var += [R(base, bk=64, stages=6), R(base, bk=64, stages=8), R(base, stages=3)]
        elif kind == "gate_up":
            var += [R(base, bn=128), R(base, bk=64, stages=6), R(base, bk=64, stages=8), R(base, stages=3), R(base, bn=128, bk=64, stages=5), R(base, bn=128, bk=64, warps=8, stages=4)]
        else:
            var += [R(base, bn=64), R(base, bk=64, stages=4), R(base, bk=64, stages=3), R(base, bn=64, bk=64, stages=6), R(base, bk=64, stages=4, warps=8), R(base, bn=256, bk=64, warps=8, stages=3)]
        for t in dict.fromkeys(var):
            st.tiles_override = {kind: t}
            try:
                ms = graph_ms(fns[kind]); c = 4 if kind == "head" else L
                rec(k=kind, m=name, rows=rows, t=str(dataclasses.astuple(t)), us=ms / c * 1e3, share=n * k * 2 / 4.27e6 / (ms / c * 1e3))
            except Exception as e: print("FAIL", kind, t, repr(e)[:200])
    st.tiles_override = {}
    import torch.nn.functional as F
    for kind, (n, k) in g.items():
        if kind == "head": continue
        x = torch.randn(rows, k, device=dev, dtype=torch.bfloat16); l0 = w.layers
        W = {"qkv": lambda l: l.q.as_strided((n, k), (k, 1)), "o": lambda l: l.o, "gate_up": lambda l: l.gate.as_strided((n, k), (k, 1)), "down": lambda l: l.down}[kind]
        y = torch.empty(rows, n, device=dev, dtype=torch.bfloat16)
        ms = graph_ms(lambda: [torch.mm(x, W(l).t(), out=y) for l in l0]); rec(k=kind, m=name, rows=rows, t="cublas", us=ms / L * 1e3)
W = {}
for name in ("0.6B", "4B"):
    w = W[name] = weights(SH[name])
    for rows, ctx in ((16, 1024), (64, 1024)):
        for ov in (True, False):
            st = make(w, len(w.layers), rows, ctx, 16, ov); hs = HeadSampler(st, 1.0, rows)
            t = time.time(); ms = graph_ms(step_fn(st, hs, rows)); rec(k="step", m=name, rows=rows, ctx=ctx, pdl=ov, ms=ms, compile_s=time.time() - t, finite=bool(torch.isfinite(st.normed[:rows].float()).all()))
            if ov:
                from torch.profiler import profile, ProfilerActivity
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g): step_fn(st, hs, rows)()
                with profile(activities=[ProfilerActivity.CUDA]) as p:
                    for _ in range(3): g.replay()
                    torch.cuda.synchronize()
                for e in sorted(p.key_averages(), key=lambda e: -e.self_device_time_total)[:8]: print("   ", e.key[:60], e.count, f"{e.self_device_time_total/e.count:.2f}us", f"{e.self_device_time_total/3e3:.3f}ms/step")
            del st, hs
print("t", time.time() - T0)
attn("0.6B", W["0.6B"], 8, 16, 1024); attn("0.6B", W["0.6B"], 8, 64, 1024)
print("t", time.time() - T0)
prod("0.6B", W["0.6B"], 16); prod("4B", W["4B"], 16)
print("t", time.time() - T0)
prod("0.6B", W["0.6B"], 64); prod("4B", W["4B"], 64)
print("t", time.time() - T0)
prod("0.6B", W["0.6B"], 256)
print("t", time.time() - T0)
attn("4B", W["4B"], 8, 64, 1024)
print("t", time.time() - T0)
