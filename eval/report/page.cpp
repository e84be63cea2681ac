#include "eval/report/html.h"

namespace qfilters::eval::report {

namespace {

constexpr std::string_view kStyle = R"css(
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2128; --soft: #59636e;
  --line: #d5dae0; --band: #f4f6f8; --grey: #a3abb5; --auto: #0b62d6;
  --on: #c2410c; --good: 34, 139, 87; --bad: #b42318; --fine: #1a7f45; }
@media (prefers-color-scheme: dark) { :root { --bg: #11151a; --fg: #e4e8ec;
  --soft: #9aa5b1; --line: #333b45; --band: #1a2028; --grey: #66707c;
  --auto: #62a8ff; --on: #ff9d5c; --good: 62, 175, 116; --bad: #ff8a80;
  --fine: #5fce92; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1340px; padding: 1rem; background: var(--bg);
  color: var(--fg); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; line-height: 1.25; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .4rem; padding-top: .8rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; max-width: 76ch; overflow-wrap: anywhere; }
caption { text-align: left; }
.soft, caption, figcaption { color: var(--soft); font-size: .88rem; }
.verdict { border-left: 5px solid var(--auto); background: var(--band);
  padding: .7rem 1rem; margin: .8rem 0; }
.verdict p { font-size: 1.05rem; }
.verdict li { margin: .15rem 0; }
.tag { display: inline-block; border: 1px solid var(--line); border-radius: 1em;
  padding: 0 .6em; font-size: .78rem; color: var(--soft); white-space: nowrap; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: .88rem; }
th, td { padding: .22rem .55rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--bg); z-index: 1; }
td.text, th.text { text-align: left; white-space: normal; }
.wide th { cursor: pointer; white-space: normal; min-width: 4.6em; }
.wide th[aria-sort=ascending]::after { content: " \25B2"; }
.wide th[aria-sort=descending]::after { content: " \25BC"; }
td small { color: var(--soft); }
td small.worse { color: var(--bad); } td small.better { color: var(--fine); }
tr.auto td:first-child { color: var(--auto); font-weight: 600; }
tr.on td, tr.on td:first-child { background: var(--band); }
tr.on td:first-child { color: var(--on); }
td.heat { background: rgba(var(--good), calc(var(--a) * .62)); }
td.heat small { color: inherit; opacity: .8; }
.bar { display: inline-block; height: .7em; background: var(--grey);
  margin-right: .5em; vertical-align: baseline; }
tr.auto .bar { background: var(--auto); } tr.on .bar { background: var(--on); }
td.bars { text-align: left; min-width: 11em; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
.small { display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 225px), 1fr)); }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { line-height: 1.3; margin-bottom: .2rem; }
figcaption b { color: var(--fg); } figure.auto figcaption b { color: var(--auto); }
figure.on figcaption b { color: var(--on); }
.small figure { overflow-x: auto; }
.small table { font-size: .78rem; width: 100%; }
.small th, .small td { padding: .1rem .15rem; text-align: center;
  line-height: 1.15; vertical-align: middle; position: static; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg text.title { fill: var(--fg); font-weight: 600; font-size: 14px; }
svg .axis { stroke: var(--line); } svg .frame { stroke: var(--grey); fill: none; }
svg .ref { stroke: var(--soft); stroke-dasharray: 5 4; }
svg .series path { fill: none; stroke: var(--grey); stroke-width: 1.3; }
svg .series circle { fill: var(--grey); }
svg .series circle.edge { fill: var(--bg); stroke: var(--grey); }
svg .series .lead { stroke-width: .6; opacity: .7; }
svg .series .hit { stroke: transparent; stroke-width: 12; }
svg .auto path { stroke: var(--auto); stroke-width: 3; }
svg .auto circle { fill: var(--auto); stroke: var(--auto); }
svg .auto text { fill: var(--auto); font-weight: 700; }
svg .series.on path { stroke: var(--on); stroke-width: 3; }
svg .series.on circle { fill: var(--on); stroke: var(--on); }
svg .series.on text { fill: var(--on); font-weight: 700; }
svg .series path.lead { stroke-width: .7 !important; }
svg .series path.hit { stroke: transparent !important; stroke-width: 12 !important; }
svg .cell { fill: rgb(var(--good)); }
svg .cell.off { fill: var(--bad); }
.chips { display: flex; flex-wrap: wrap; gap: .35rem; position: sticky; top: 0;
  background: var(--bg); padding: .5rem 0; z-index: 2; }
.chips button { font: inherit; font-size: .85rem; color: var(--fg); padding: .1rem .7rem;
  background: var(--band); border: 1px solid var(--line); border-radius: 1em;
  cursor: pointer; }
.chips button.auto { border-color: var(--auto); color: var(--auto); }
.chips button.on { border-color: var(--on); color: var(--on); }
code { font-size: .85em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
@media (max-width: 500px) { body { padding: .7rem; }
  svg text { font-size: 14.5px; } svg text.title { font-size: 17px; }
  .small { grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); }
  .small th, .small td { padding: .1rem 0; font-size: .68rem; }
  .chips { flex-wrap: nowrap; overflow-x: auto; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { :root { --bg: #fff; --fg: #000; --soft: #444; --line: #ccc;
  --band: #f4f4f4; --grey: #999; --auto: #0b62d6;
  --good: 34, 139, 87; --bad: #b42318; --fine: #1a7f45; }
  body { max-width: none; padding: 0; font-size: 11px; }
  .chips { display: none; } .grid { grid-template-columns: 1fr 1fr; }
  .small { grid-template-columns: repeat(4, 1fr); }
  .scroll { overflow: visible; } td, th { position: static !important;
  white-space: normal; padding: .1rem .3rem; } section { break-inside: auto; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
)css";

constexpr std::string_view kScript = R"js(
(function () {
  'use strict';
  var pinned = new Set(), over = null;
  function paint() {
    document.querySelectorAll('[data-p]').forEach(function (e) {
      e.classList.toggle('on', pinned.has(e.dataset.p) || e.dataset.p === over);
      if (e.tagName === 'BUTTON') {
        e.setAttribute('aria-pressed', pinned.has(e.dataset.p));
      } else if (e.tagName === 'g' && e.classList.contains('on')) {
        e.parentNode.appendChild(e);
      }
    });
  }
  function of(event) {
    var e = event.target.closest && event.target.closest('[data-p]');
    return e && !e.closest('tbody') ? e.dataset.p : null;
  }
  document.addEventListener('pointerover', function (event) {
    if (event.pointerType !== 'mouse' || of(event) === over) return;
    over = of(event);
    paint();
  });
  document.addEventListener('click', function (event) {
    var p = of(event);
    if (p !== null) {
      pinned.has(p) ? pinned.delete(p) : pinned.add(p);
      paint();
      return;
    }
    var th = event.target.closest && event.target.closest('.wide th');
    if (!th) return;
    var body = th.closest('table').tBodies[0], i = th.cellIndex;
    var up = th.getAttribute('aria-sort') !== 'ascending';
    th.parentNode.querySelectorAll('th').forEach(function (other) {
      other.removeAttribute('aria-sort');
    });
    th.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    function key(row) { return row.cells[i].dataset.v; }
    Array.from(body.rows).sort(function (a, b) {
      var x = key(a), y = key(b);
      if (x === '' || y === '') return (x === '') - (y === '');
      var d = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return up ? d : -d;
    }).forEach(function (row) { body.appendChild(row); });
  });
})();
)js";

}  // namespace

std::string_view style() {
  return kStyle;
}

std::string_view script() {
  return kScript;
}

}  // namespace qfilters::eval::report
