"use strict";
// Shows a chart's values at the pointer, at a touch or by the arrow keys. The charts are plain SVG and work without this script.
const NS = "http://www.w3.org/2000/svg";

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function write(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function attach(root) {
  for (const figure of root.querySelectorAll(".figure[data-chart]")) {
    const chart = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
    const reader = document.createElement("div");
    reader.className = "reader";
    reader.hidden = true;
    figure.append(reader);
    let cursor = null;
    let index = 0;

    const grid = chart.series.reduce((longest, series) => (series.x.length > longest.length ? series.x : longest), []);

    function hide() {
      reader.hidden = true;
      if (cursor) cursor.remove();
    }

    function show(svg, x) {
      const [low, high, left, right, top, bottom] = svg.dataset.x.split(" ").map(Number);
      const slack = (high - low) * 0.02;
      const rows = [];
      for (const series of chart.series) {
        if (!series.x.length) continue;
        const at = nearest(series.x, x);
        if (Math.abs(series.x[at] - x) > Math.max(slack, (series.gap || 0))) continue;
        rows.push([series.tone, series.name, series.y[at]]);
      }
      if (!rows.length) { hide(); return; }
      const pixel = left + ((x - low) / (high - low)) * (right - left);
      if (cursor) cursor.remove();
      cursor = document.createElementNS(NS, "path");
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("d", `M${pixel.toFixed(1)} ${top}V${bottom}`);
      svg.append(cursor);
      reader.replaceChildren();
      const head = document.createElement("div");
      head.textContent = `${chart.x} ${write(x)}`;
      reader.append(head);
      for (const [tone, name, value] of rows) {
        const row = document.createElement("div");
        const chip = document.createElement("i");
        chip.style.background = `var(--c${tone})`;
        row.append(chip, name ? `${name}  ${write(value)}` : write(value));
        reader.append(row);
      }
      reader.hidden = false;
      const scale = svg.clientWidth / svg.viewBox.baseVal.width;
      const place = pixel * scale;
      const flip = place + reader.offsetWidth + 16 > svg.clientWidth;
      reader.style.left = `${Math.max(0, flip ? place - reader.offsetWidth - 12 : place + 12)}px`;
      reader.style.top = `${top * scale + 4}px`;
    }

    for (const svg of figure.querySelectorAll("svg[data-x]")) {
      svg.tabIndex = 0;
      const [low, high, left, right] = svg.dataset.x.split(" ").map(Number);
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        const pixel = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        if (pixel < left - 8 || pixel > right + 8) { hide(); return; }
        index = nearest(grid, low + ((pixel - left) / (right - left)) * (high - low));
        show(svg, grid[index]);
      });
      svg.addEventListener("pointerleave", hide);
      svg.addEventListener("blur", hide);
      svg.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1, Home: -grid.length, End: grid.length }[event.key];
        if (!move) return;
        event.preventDefault();
        index = Math.min(grid.length - 1, Math.max(0, index + move));
        show(svg, grid[index]);
      });
    }
  }
}

attach(document);
