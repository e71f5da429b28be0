from tune_decode import *
from modeling.decode_tiles import AttentionTiles
R = dataclasses.replace
def bm_of(rows): return next(b for b in (16, 32, 64, 128) if rows <= b or b == 128)
def search(name, w, rows, ctx, cand, deadline):
    L = len(w.layers)
    st = make(w, L, rows, ctx, 16)
    st.parts = torch.zeros(64 << 20, device=dev)
    hs = HeadSampler(st, rows)
    def once(cfg):
        st.override, st.attention_override = {}, None
        for k, t in cfg.items():
            if k == "attn": st.attention_override = AttentionTiles(*t)
            else: st.override[k] = Tiles(t[0], t[6] if len(t) > 6 else bm_of(rows), *t[1:6])
        def f(): st.launch(rows); hs.launch(rows, 1.0)
        return graph_ms(f, 30)
    cfg = {}; best = once(cfg)
    rec(k="base", m=name, rows=rows, ctx=ctx, ms=best)
    for kind in cand:
        for c in cand[kind]:
            if time.time() - T0 > deadline: break
            new = dict(cfg); new[kind] = c
            try: ms = once(new)
            except Exception as e: print("FAIL", kind, c, repr(e)[:120]); continue
            rec(k=kind, m=name, rows=rows, c=str(c), ms=ms, d_us=(ms - best) / L * 1e3)
            if ms < best - 0.003: best, cfg = ms, new
    rec(k="best", m=name, rows=rows, ctx=ctx, ms=best, cfg=str(cfg)); print("t", time.time() - T0, flush=True)
w4 = weights(SH["4B"])
search("4B", w4, 64, 1024, {
  "qkv": [(128, 64, 3, 3, 4, 128), (128, 64, 3, 4, 8, 128), (128, 64, 2, 4, 8, 128), (128, 64, 5, 3, 4, 128)],
  "o": [(128, 64, 7, 3, 4, 128), (128, 64, 8, 3, 8, 128), (128, 64, 6, 4, 8, 128), (64, 64, 3, 6, 4, 128)],
  "gate_up": [(128, 64, 1, 3, 4, 64), (64, 64, 1, 3, 4, 64), (128, 64, 1, 4, 4, 64), (128, 64, 1, 5, 8, 64)],
  "down": [(128, 64, 8, 3, 4, 128), (128, 64, 7, 4, 8, 128), (128, 64, 6, 4, 8, 64), (128, 64, 13, 3, 4, 64), (64, 64, 6, 3, 4, 128)],
  "head": [(64, 64, 1, 3, 4, 64), (128, 64, 1, 3, 4, 64), (64, 64, 1, 2, 4, 64), (128, 64, 1, 3, 8, 64)],
  "attn": [(32, 2, 5, 528, 128), (32, 2, 7, 528, 0), (32, 2, 7, 528, 64), (64, 4, 7, 264, 0), (32, 2, 9, 528, 0)]}, 48)
search("4B", w4, 16, 1024, {
  "attn": [(64, 4, 7, 264, 64), (32, 2, 7, 528, 0), (64, 4, 9, 132, 0), (32, 2, 9, 264, 0), (64, 4, 5, 264, 0)],
  "gate_up": [(64, 64, 1, 3, 4, 128), (64, 64, 1, 3, 4, 64), (64, 64, 1, 5, 4, 64), (64, 64, 1, 4, 4, 64)],
  "down": [(64, 64, 6, 3, 4, 128), (64, 64, 9, 3, 4, 256), (64, 64, 8, 4, 4, 128), (64, 64, 6, 5, 4, 128), (64, 64, 6, 4, 4, 128)],
  "qkv": [(64, 64, 3, 3, 4, 256), (64, 64, 4, 2, 4, 256), (64, 64, 2, 2, 4, 512)],
  "o": [(64, 64, 4, 2, 4, 512), (64, 64, 6, 2, 4, 512), (64, 64, 5, 3, 4, 256)]}, 80)
del w4
w = weights(SH["0.6B"])
search("0.6B", w, 256, 1024, {
  "head": [(128, 64, 1, 3, 4, 64, 64), (64, 64, 1, 3, 4, 64, 128), (64, 64, 1, 3, 4, 64, 64), (128, 64, 1, 3, 8, 64, 128), (128, 64, 1, 3, 8, 64, 64)],
  "qkv": [(128, 64, 1, 3, 4, 64, 64), (64, 64, 1, 3, 4, 64, 64), (64, 64, 1, 4, 4, 128, 64)],
  "o": [(64, 64, 2, 3, 4, 64, 64), (64, 64, 1, 4, 4, 64, 64)], "gate_up": [(128, 64, 1, 3, 4, 64, 64), (64, 64, 1, 3, 4, 64, 64)],
  "down": [(64, 64, 2, 3, 4, 64, 64), (64, 64, 3, 3, 4, 128, 64)],
  "attn": [(64, 4, 7, 528, 0), (64, 4, 7, 528, 128), (64, 4, 5, 528, 0)]}, 110)
search("0.6B", w, 16, 1024, {"attn": [(64, 4, 7, 132, 128), (64, 4, 7, 132, 0), (64, 4, 9, 132, 128)], "qkv": [(64, 64, 1, 2, 8, 1024)]}, 116)
search("0.6B", w, 4, 1024, {"attn": [(64, 4, 7, 132, 128), (32, 2, 7, 264, 0)]}, 122)
