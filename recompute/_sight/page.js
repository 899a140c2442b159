"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const slider = $("budget"), picture = $("picture"), told = $("told");
  const HOW = ["first", "again", "fetched", "moved"];
  const WORD = ["computed", "recomputed", "fetched", "in a tier"];
  let row = -1;

  const make = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const bytes = (size) => {
    for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (size >= unit) return (size / unit).toPrecision(3) + " " + name;
    return size + " B";
  };
  const time = (s) => s >= 120 ? Math.round(s / 60) + " min" : s >= 1 ? s.toPrecision(3) + " s"
    : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
  const percent = (share) => (100 * share).toPrecision(3).replace(/\.?0+$/, "") + " %";
  const look = () => data.looks[slider.value];
  const name = (at) => {
    const value = data.values[at];
    return value[0] + ", " + bytes(value[2]) + (value[1] ? ", " + value[1] : "");
  };

  function say(at) {
    row = at;
    for (const band of picture.querySelectorAll(".band")) band.classList.toggle("on", +band.dataset.row === at);
    if (at < 0) { told.textContent = data.hint; return; }
    const stays = look().rows[at] || [], counts = [0, 0, 0, 0];
    for (let i = 2; i < stays.length; i += 3) counts[stays[i]]++;
    const parts = counts.map((n, how) => n ? WORD[how] + " " + (n > 1 ? n + " times" : "once") : "").filter(Boolean);
    told.textContent = "Value " + (at + 1) + " of " + data.values.length + ": " + name(at) + ": "
      + (parts.join(", ") || "never in memory for long");
  }

  function draw() {
    const now = look(), width = Math.max(280, picture.clientWidth), left = 58, right = 8, high = 150, top = 8;
    const small = width < 600, gap = small ? 9 : 11, rows = data.values.length;
    const strip = top + high + 8, first = strip + 14, bottom = first + rows * gap;
    const svg = make("svg", { viewBox: `0 0 ${width} ${bottom + 34}`, class: "chart", width, height: bottom + 34,
      role: "img", "aria-label": summary(now) });
    const x = (part) => left + (width - left - right) * part;
    const most = Math.max(data.whole, now.budget);
    const y = (size) => top + high * (1 - size / (1.04 * most));
    if (now.status === "ok") {
      for (let i = 0; i <= 2; i++) {
        const at = y(most * i / 2);
        svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }),
          make("text", { x: left - 5, y: at + 4, "text-anchor": "end" }, i ? bytes(most * i / 2) : "0"));
      }
      const n = now.used.length;
      let line = "";
      now.used.forEach((size, i) => { line += `L${x(i / n).toFixed(1)} ${y(size).toFixed(1)}H${x((i + 1) / n).toFixed(1)}`; });
      const edge = "M" + line.slice(1);
      svg.append(make("path", { class: "area", d: edge + `V${y(0)}H${left}Z` }), make("path", { class: "edge", d: edge }));
      svg.append(make("line", { class: "limit", x1: left, x2: width - right, y1: y(now.budget), y2: y(now.budget) }));
      let spent = "";
      now.again.forEach((share, i) => {
        if (share) spent += `M${x(i / n).toFixed(1)} ${strip + 9}v${(-9 * share / 100).toFixed(1)}h${(x(1 / n) - x(0)).toFixed(2)}V${strip + 9}Z`;
      });
      svg.append(make("path", { class: "spent", d: spent }));
      if (!small) svg.append(make("text", { x: left - 5, y: strip + 9, "text-anchor": "end" }, "repeated"));
      const paths = ["", "", "", ""];
      for (let r = 0; r < rows; r++) {
        const up = first + r * gap, band = make("rect", { class: "band" + (r === row ? " on" : ""), x: 0, y: up, width, height: gap });
        band.dataset.row = r;
        svg.append(band);
        const stays = now.rows[r] || [];
        for (let i = 0; i < stays.length; i += 3) {
          const from = x(stays[i] / data.steps), to = x((stays[i] + stays[i + 1]) / data.steps);
          paths[stays[i + 2]] += `M${from.toFixed(1)} ${up + 1}h${Math.max(.7, to - from).toFixed(1)}v${gap - 2}H${from.toFixed(1)}Z`;
        }
      }
      paths.forEach((d, how) => { if (d) svg.append(make("path", { class: "stay " + HOW[how], d, "pointer-events": "none" })); });
      svg.append(make("text", { x: left, y: bottom + 16, "text-anchor": "start" }, "0"),
        make("text", { x: width - right, y: bottom + 16, "text-anchor": "end" }, time(now.seconds)),
        make("text", { x: (left + width) / 2, y: bottom + 16, "text-anchor": "middle" }, "time of compute"));
    } else {
      svg.append(make("text", { x: width / 2, y: high, "text-anchor": "middle", class: "strong" }, summary(now)));
    }
    picture.replaceChildren(svg);
  }

  function summary(now) {
    if (now.status === "oom") return bytes(now.budget) + " do not work: something does not fit.";
    if (now.status !== "ok") return bytes(now.budget) + " do not work: more than " + data.limit + " times the compute.";
    return `${bytes(now.budget)} (${percent(now.share)} of the peak): overhead ${now.overhead.toFixed(3)}, `
      + `${time(now.seconds)} of compute, ${now.rematerializations.toLocaleString("en")} recomputations`
      + (now.peak > now.budget ? `; ${bytes(now.peak - now.budget)} over the budget while a size was not known` : "");
  }

  function table(id, rows, cells) {
    $(id).replaceChildren(...(rows.length ? rows : [null]).map((entry) => {
      const line = document.createElement("tr");
      for (const [text, under, number] of entry ? cells(entry) : [["nothing", "", false], ["", "", true], ["", "", true]]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        if (number) cell.className = "n";
        if (under) {
          const at = document.createElement("span");
          at.className = "at"; at.textContent = under; cell.append(at);
        }
        line.append(cell);
      }
      return line;
    }));
  }

  function turn() {
    const now = look();
    slider.setAttribute("aria-valuetext", summary(now));
    $("summary").textContent = summary(now);
    $("paste").textContent = now.paste;
    for (const curve of document.querySelectorAll("svg.curve")) {
      const at = +curve.dataset.left + (curve.dataset.one - curve.dataset.left) * now.share;
      const cursor = curve.querySelector(".cursor");
      cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    }
    table("held", now.held, (e) => [[e[0], e[1]], [bytes(e[2]), "", true], [e[3].toLocaleString("en"), "", true]]);
    table("repeated", now.repeated, (e) => [[e[0], e[1]], [time(e[3]), "", true], [e[2].toLocaleString("en"), "", true]]);
    $("left").textContent = now.left_out ? now.left_out.toLocaleString("en") + " stays are too short to be drawn." : "";
    draw();
    say(row);
  }

  function rowAt(event) {
    const band = event.target.closest && event.target.closest(".band");
    return band ? +band.dataset.row : -1;
  }
  picture.addEventListener("mousemove", (event) => { const at = rowAt(event); if (at >= 0) say(at); });
  picture.addEventListener("click", (event) => { const at = rowAt(event); if (at >= 0) say(at); });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 5, PageUp: -5 }[event.key];
    const last = data.values.length - 1;
    if (event.key === "Home") say(0);
    else if (event.key === "End") say(last);
    else if (step) say(Math.min(last, Math.max(0, row < 0 ? 0 : row + step)));
    else return;
    event.preventDefault();
  });
  picture.addEventListener("focus", () => { if (row < 0 && data.values.length) say(0); });
  slider.addEventListener("input", turn);
  let width = 0;
  new ResizeObserver(() => { if (picture.clientWidth !== width) { width = picture.clientWidth; draw(); } }).observe(picture);
  addEventListener("beforeprint", () => { for (const more of document.querySelectorAll("details")) more.open = true; });

  const packed = $("trace");
  if (packed) {
    const buffer = () => Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
    const link = $("download");
    link.addEventListener("click", () => {
      link.href = URL.createObjectURL(new Blob([buffer()], { type: "application/gzip" }));
    });
    $("perfetto").addEventListener("click", () => {
      const home = "https://ui.perfetto.dev", opened = window.open(home);
      if (!opened) { $("opened").textContent = "The browser did not open a window: download the trace, and open it there."; return; }
      const ask = setInterval(() => opened.postMessage("PING", home), 100);
      addEventListener("message", function answer(event) {
        if (event.origin !== home || event.data !== "PONG") return;
        clearInterval(ask);
        removeEventListener("message", answer);
        opened.postMessage({ perfetto: { buffer: buffer().buffer, title: data.name } }, home);
      });
    });
  }
  turn();
})();
