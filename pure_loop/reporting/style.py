"""How a report looks: on a phone and on a desk, in light and dark, and on paper."""

from __future__ import annotations

# Colours that people with any sight of colours tell apart, and lines that differ by their dashes, too.
STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1a1d21;--soft:#59616b;--line:#e3e5e8;--good:#06724e;
--bad:#b3261e;--c0:#0063a6;--c1:#c24e00;--c2:#00805d;--c3:#a8437f;--c4:#7d6500}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1c2024;--ink:#e8eaed;--soft:#a2abb5;
--line:#32383f;--good:#4cc38a;--bad:#ff8a80;--c0:#62b6f3;--c1:#f0954d;--c2:#3ccf9f;--c3:#e79ac6;--c4:#e0cb4f}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:1240px;padding:32px clamp(16px,3vw,40px) 48px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;overflow-wrap:anywhere}
h1{font-size:clamp(22px,4vw,32px);line-height:1.2;letter-spacing:-.02em;margin:0 0 8px}
h2{font-size:19px;letter-spacing:-.01em;margin:0 0 14px}
h3{font-size:14px;margin:0}
small{color:var(--soft);font-size:12px;font-weight:400}
section{margin-top:44px}
.about{color:var(--soft);margin:0}
.about span{border-radius:99px;border:1px solid;font-size:13px;font-weight:600;margin-right:10px;padding:2px 10px}
.done{color:var(--good)}.open{color:var(--c1)}
dl,dd,ul{margin:0;padding:0}
.cards{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin:24px 0 18px}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.cards dt{color:var(--soft);font-size:13px}
.cards b{display:block;font-size:24px;font-weight:600;letter-spacing:-.02em;line-height:1.3}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px}
a{color:var(--c0)}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,350px),1fr))}
figure{background:var(--card);border:1px solid var(--line);border-radius:10px;break-inside:avoid;display:flex;
flex-direction:column;justify-content:space-between;margin:0;padding:12px 14px 8px}
figcaption{padding-bottom:8px}
figure svg{display:block;width:100%}
.legend{display:flex;flex-wrap:wrap;font-size:12.5px;gap:0 14px;list-style:none}
figure .swatch{display:inline-block;height:8px;margin-right:6px;width:24px}
svg text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);stroke-width:1}
.line{fill:none;stroke-linecap:round;stroke-linejoin:round;stroke-width:1.8}
.band{opacity:.22}
.lost{fill:none;stroke:var(--bad);stroke-width:1.5}
.best{fill:var(--card);fill-opacity:.2;stroke-width:1.6}
.line.c0,.best.c0{stroke:var(--c0)}.band.c0,.point.c0{fill:var(--c0)}
.line.c1,.best.c1{stroke:var(--c1)}.band.c1,.point.c1{fill:var(--c1)}
.line.c2,.best.c2{stroke:var(--c2)}.band.c2,.point.c2{fill:var(--c2)}
.line.c3,.best.c3{stroke:var(--c3)}.band.c3,.point.c3{fill:var(--c3)}
.line.c4,.best.c4{stroke:var(--c4)}.band.c4,.point.c4{fill:var(--c4)}
.line.c1{stroke-dasharray:7 3.5}.line.c2{stroke-dasharray:2 3.5}.line.c3{stroke-dasharray:9 3 2 3}
.line.c4{stroke-dasharray:4 3}
.table{background:var(--card);border:1px solid var(--line);border-radius:10px;overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;overflow-wrap:normal;width:100%}
th,td{border-bottom:1px solid var(--line);padding:7px 14px;text-align:right;white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
th[scope=row],.word{max-width:min(420px,48vw);overflow-wrap:break-word;text-align:left;white-space:normal}
tbody th{background:var(--card);font-weight:500;left:0;position:sticky}
td small,.mark{white-space:nowrap}
thead th{color:var(--soft);font-size:12.5px;font-weight:500;vertical-align:bottom}
.note{color:var(--soft);font-size:13px;margin:8px 2px 0}
.mark{border:1px solid var(--good);border-radius:99px;color:var(--good);font-size:12px;padding:0 8px}
.problems{border-left:3px solid var(--bad);list-style:none;padding-left:14px}
.settings{columns:2 420px;column-gap:40px;font-size:14px}
.settings div{border-bottom:1px solid var(--line);break-inside:avoid;display:grid;gap:0 16px;
grid-template-columns:minmax(110px,34%) 1fr;padding:5px 0}
.settings dt{color:var(--soft)}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;font-size:13px;margin:0;max-height:340px;
overflow:auto;padding:12px 14px;white-space:pre-wrap}
section h3:not(figure h3){margin:18px 0 8px}
@media(max-width:600px){th,td{padding:6px 9px}}
footer{color:var(--soft);font-size:13px;margin-top:48px}
@media print{body{background:none;font-size:11px;max-width:none;padding:0}nav{display:none}section{margin-top:22px}
.charts{grid-template-columns:repeat(2,1fr)}.table{overflow:visible}tr{break-inside:avoid}h2{break-after:avoid}}
""".strip()
