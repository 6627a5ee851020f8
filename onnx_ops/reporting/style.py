"""The style sheet of the HTML report: light and dark, wide and narrow."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#59636e;--rule:#d5dae0;--card:#f6f8fa;--grid:#e6e9ed;
--pass:#116329;--inconclusive:#7d4e00;--error:#8250df;--fail:#b3131f;
--s0:#0550ae;--s1:#b35900;--s2:#116329;--s3:#8250df;--s4:#a0111f;--s5:#5c6670}
@media (prefers-color-scheme:dark){:root{--bg:#0e1116;--fg:#e3e8ee;--soft:#9aa4af;--rule:#363d46;--card:#171b22;
--grid:#262c34;--pass:#4ac26b;--inconclusive:#e0a63a;--error:#bc8cff;--fail:#ff7b72;
--s0:#6cb2ff;--s1:#f0a35e;--s2:#56d364;--s3:#c9a2ff;--s4:#ff8a80;--s5:#aab4be}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:80rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:0}h2{font-size:1.25rem;margin:2.2rem 0 .6rem}h3{font-size:1rem;margin:0 0 .3rem}
p{margin:.4rem 0}.soft,figcaption,small{color:var(--soft)}small,figcaption{font-size:.84rem}
code{font:.85em ui-monospace,monospace}
.card{border:1px solid var(--rule);border-left:.4rem solid var(--tone);border-radius:.4rem;background:var(--card);
padding:.8rem 1rem;margin:.8rem 0}.card>p:first-child{font-size:1.15rem;margin:0}
.pass{--tone:var(--pass)}.inconclusive{--tone:var(--inconclusive)}.error{--tone:var(--error)}.fail{--tone:var(--fail)}
.verdict{color:var(--tone);font-weight:700;white-space:nowrap}
.card ul{margin:.5rem 0 0;padding-left:1.2rem}
.scroll{overflow-x:auto;border:1px solid var(--rule);border-radius:.4rem}
table{border-collapse:collapse;width:100%;font-size:.85rem;overflow-wrap:normal}
th,td{padding:.4rem .45rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{font-weight:600;white-space:nowrap}thead th{background:var(--card)}tbody tr:last-child>*{border-bottom:0}
td.figure{white-space:nowrap;font-variant-numeric:tabular-nums}td.reason{min-width:15rem;overflow-wrap:anywhere}
.group>th{white-space:normal;background:var(--card)}.group span{position:sticky;left:.45rem;display:inline-block;
max-width:min(76rem,calc(100vw - 3rem))}td.words{min-width:5rem}small{font-weight:400}tr.advisory>td{color:var(--soft)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1rem}
figure{margin:0;padding:.8rem;border:1px solid var(--rule);border-radius:.4rem;min-width:0}
svg{display:block;width:100%;max-width:36rem;height:auto}
.keys{list-style:none;margin:.3rem 0;padding:0;font-size:.84rem}
.keys li{padding-left:1.6rem;position:relative}
.keys li:before{content:"";position:absolute;left:0;top:.6em;width:1.1rem;border-top:3px solid var(--c)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;font-size:.9rem;margin:0}
dt{color:var(--soft)}dd{margin:0;min-width:0}
svg text{fill:var(--fg);font:12.5px system-ui,sans-serif;paint-order:stroke;stroke:var(--bg);stroke-width:3px}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft)}.line{fill:none;stroke:var(--c,var(--fg));stroke-width:2}
.one{stroke:var(--soft);stroke-width:1}.limit{stroke:var(--fail);stroke-dasharray:6 4;stroke-width:1.5}
.estimate{stroke:var(--s0)}.stem{stroke:var(--s0)}.bad-line{stroke:var(--fail)}.band{fill:var(--s0);opacity:.18}
.solid{fill:var(--s0)}.faint{fill:var(--s0);opacity:.55}.bad{fill:var(--fail)}
.hollow{fill:var(--bg);stroke:var(--soft);stroke-width:1.5}.ring{fill:none;stroke:var(--fg);stroke-width:1.5}
.full{fill:var(--c);stroke:var(--c);stroke-width:2}.open{fill:var(--bg);stroke:var(--c);stroke-width:2}
.dash{stroke-dasharray:7 3}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}
@media (max-width:40rem){td.fold{white-space:normal}svg text{font-size:14px}
dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}body{padding:1rem .75rem 2rem}}
"""
