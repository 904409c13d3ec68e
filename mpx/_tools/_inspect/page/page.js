"use strict";
// The page of a report. Data come compactly: each text once, operations as lists of
// numbers. The view (filters, sorting) is kept in the address after '#'.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const text = (index) => data.texts[index];
  const list = (indices) => indices.map(text);

  const operations = data.operations.map((row) => {
    const o = {};
    data.fields.forEach((field, i) => { o[field] = row[i]; });
    for (const field of data.single) o[field] = text(o[field]);
    for (const field of data.several) o[field] = list(o[field]);
    o.where = o.scope || o.function;
    o.count = 1;
    const isEmulated = o.format !== o.precision && !/^float(8|6_|4_)/.test(o.precision);
    o.shown = isEmulated ? o.format : o.precision;
    return o;
  });

  // --- Numbers and names as a person reads them ----------------------------------

  const STEPS = ["", "k", "M", "G", "T", "P", "E"];
  function scaled(n) {
    if (n < 1000) return [String(n), ""];
    let step = Math.min(Math.floor(Math.log10(n) / 3), STEPS.length - 1);
    let x = n / 1000 ** step;
    if (x >= 999.5 && step < STEPS.length - 1) { step += 1; x /= 1000; }
    const digits = x < 9.995 ? 2 : x < 99.95 ? 1 : 0;
    return [x.toFixed(digits), STEPS[step]];
  }
  const flopsText = (n) => n === null ? "?" : scaled(n).join(" ").trim();
  const bytesText = (n) => scaled(n).join(" ") + "B";
  const countText = (n) => n.toLocaleString("en-US");
  const shareText = (x) =>
    (x >= 0.9995 && x < 1 ? 99.9 : 100 * x).toFixed(1) + " %";
  function shortType(type) {
    return type.replace(/^bfloat(\d+)/, "bf$1").replace(/^float8_/, "f8_")
      .replace(/^float(\d+)/, "f$1").replace(/^uint(\d+)/, "u$1")
      .replace(/^int(\d+)/, "i$1").replace(/^complex(\d+)/, "c$1");
  }
  function tone(precision) {
    if (precision.startsWith("MXFP8")) return "--blocks";
    if (/^(NVFP4|float4_)/.test(precision)) return "--four";
    if (precision === "bfloat16" || precision === "float16") return "--half";
    if (/^(FP8|float8|float6_|INT8|u?int8)/.test(precision)) return "--low";
    if (precision === "float32") return "--full";
    if (precision === "mixed") return "--mixed";
    if (/^(float64|complex)/.test(precision)) return "--wide";
    return "--other";
  }
  const toned = (precision) => "--tone: var(" + tone(precision) + ")";

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key === "onclick") node.addEventListener("click", value);
      else if (value !== false && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.filter((x) => x !== "" && x !== null));
    return node;
  }

  // --- Totals -----------------------------------------------------------------------

  const totals = data.totals;
  function stack(byPrecision, whole) {
    return make("div", { class: "stack" }, ...byPrecision.map(([name, flops]) =>
      make("i", {
        style: toned(name) + "; width: " + (100 * flops) / (whole || 1) + "%",
        title: name + ": " + flopsText(flops) + "FLOPs",
      })));
  }
  function card(title, number, says, extra, kind) {
    return make("div", { class: "card " + (kind || "") },
      make("h2", {}, title), make("div", { class: "number" }, number),
      ...(extra || []), make("div", { class: "says" }, says));
  }
  function showTotals() {
    const shares = Object.entries(totals.flops_by_format);
    const legend = make("div", { class: "legend" }, ...shares.map(([name, flops]) =>
      make("span", { style: toned(name) }, make("i"),
        name + " " + shareText(flops / totals.flops))));
    at("subtitle").textContent = data.headline + " \u00b7 " +
      countText(totals.operations) + " operations, " + countText(totals.executed) + " run";
    at("cards").append(
      card("FLOPs", flopsText(totals.flops), "", [stack(shares, totals.flops), legend],
        "wide"),
      card("in half precision", shareText(totals.half_flops_share), "of the FLOPs" +
        (totals.low_flops_share
          ? "; " + shareText(totals.low_flops_share) + " in 8 bits and fewer" : "")),
      card("casts", countText(totals.casts), "moving " + bytesText(totals.cast_bytes) +
        " if nothing were fused"),
      card("residuals",
        totals.residual_bytes === null ? "?" : bytesText(totals.residual_bytes),
        totals.residuals),
      card("traffic", bytesText(totals.bytes), "read and written if nothing were fused"),
      card("findings", countText(totals.findings), totals.findings
        ? "operations worth a look" : "nothing looks like an accident", [],
        totals.findings ? "alarm" : ""));
    at("notes").append(...data.notes.map((note) => make("p", {}, note)));
  }

  // Where the FLOPs are: the paths cut at the depth at which they begin to differ.
  function showPlaces() {
    const costly = operations.filter((o) => o.flops);
    if (!costly.length) { at("places").hidden = true; return; }
    let groups = new Map();
    for (let depth = 1; depth <= 8; depth += 1) {
      const next = new Map();
      for (const o of costly) {
        const name = o.where.split("/").slice(0, depth).join("/");
        if (!next.has(name)) next.set(name, new Map());
        const group = next.get(name);
        group.set(o.format, (group.get(o.format) || 0) + o.flops);
      }
      if (groups.size && next.size > 14) break;
      groups = next;
      if (groups.size >= 8) break;
    }
    const sum = (group) => [...group.values()].reduce((a, b) => a + b, 0);
    const sorted = [...groups].sort((a, b) => sum(b[1]) - sum(a[1])).slice(0, 14);
    const largest = sum(sorted[0][1]);
    at("bars").append(...sorted.map(([name, group]) => {
      const flops = sum(group);
      return make("button", {
        class: "place", type: "button", title: name + ": show its operations",
        onclick: () => { view.scope = name; changed(); },
      }, make("span", { class: "code path" }, make("bdi", {}, name || "(no scope)")),
      stack([...group].sort((a, b) => b[1] - a[1]), largest),
      make("span", {}, flopsText(flops)));
    }));
  }

  // --- The view ---------------------------------------------------------------------

  const COLUMNS = [
    ["number", "#", true], ["primitive", "operation"], ["shown", "dtype"],
    ["where", "where"], ["types", "in \u2192 out"], ["weight", "weight"],
    ["runs", "runs", true], ["flops", "FLOPs", true], ["bytes", "bytes", true],
    ["why", "why"], ["source", "line"],
  ];
  const NUMERIC = new Set(COLUMNS.filter((c) => c[2]).map((c) => c[0]));
  const PAGE = 200;
  const DEFAULTS = {
    text: "", scope: "", phase: "", precision: "", findings: "", costly: "",
    group: "1", sort: "flops", down: "1",
  };
  let view = { ...DEFAULTS };
  let shownRows = PAGE;
  let rows = [];

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    view = { ...DEFAULTS };
    for (const [key, value] of given) if (key in DEFAULTS) view[key] = value;
  }
  function writeAddress() {
    const given = new URLSearchParams();
    for (const key of Object.keys(DEFAULTS)) {
      if (view[key] !== DEFAULTS[key]) given.set(key, view[key]);
    }
    const address = "#" + given;
    try { history.replaceState(null, "", address); } catch { /* in a frame */ }
  }

  const haystack = (o) => [o.primitive, o.where, o.scope, o.function, o.phase, o.leg,
    o.inputs.join(" "), o.outputs.join(" "), o.precision, o.format, o.rule, o.reason, o.finding,
    o.parameters.join(" "), o.source, o.inside.join(" "), shortType(o.precision),
    ...o.inputs.map(shortType), ...o.outputs.map(shortType)].join("\n").toLowerCase();
  for (const o of operations) o.haystack = haystack(o);

  function matches(o) {
    const words = view.text.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = view.precision ? view.precision.split(",") : [];
    return words.every((word) => o.haystack.includes(word)) &&
      (!view.scope || o.scope.includes(view.scope) || o.function.includes(view.scope)) &&
      (!view.phase || o.phase === view.phase) &&
      (!chosen.length || chosen.includes(o.shown)) &&
      (!view.findings || o.finding) &&
      (!view.costly || o.flops || o.is_cast);
  }
  const sameKey = (o) => [o.primitive, o.where, o.phase, o.leg, o.inputs, o.outputs, o.rule,
    o.finding, o.source, o.inside, o.unknown_loops, o.stack].join("\n");
  function grouped(found) {
    const groups = new Map();
    for (const o of found) {
      const key = sameKey(o);
      const first = groups.get(key);
      if (!first) { groups.set(key, { ...o }); continue; }
      first.count += 1;
      first.executions += o.executions;
      first.flops = first.flops === null ? null : first.flops + o.flops;
      first.bytes += o.bytes;
      first.parameters = [...new Set([...first.parameters, ...o.parameters])];
    }
    return [...groups.values()];
  }
  const VALUES = {
    types: (o) => o.inputs.join(" ") + " " + o.outputs.join(" "),
    weight: (o) => o.parameters[0] || "\uffff",
    runs: (o) => o.executions,
    why: (o) => (o.finding ? "\u0000" : "") + o.rule + o.reason,
  };
  function sorted(found) {
    const value = VALUES[view.sort] || ((o) => o[view.sort]);
    const sign = view.down ? -1 : 1;
    return found.slice().sort((a, b) => {
      const x = value(a), y = value(b);
      const order = NUMERIC.has(view.sort) ? (x ?? -1) - (y ?? -1)
        : String(x).localeCompare(String(y));
      return order ? sign * order : a.number - b.number;
    });
  }

  // --- The table ------------------------------------------------------------------

  function bar(value, largest) {
    const width = largest ? (56 * (value || 0)) / largest : 0;
    return make("span", { class: "bar", style: "width: " + width.toFixed(1) + "px" });
  }
  const types = (list) => list.flatMap((type) => [
    make("span", { class: "type" }, shortType(type)), " "]);
  const LEGS = { dgrad: " dgrad", wgrad: " wgrad" };
  const PHASES = { forward: "", backward: " backward", recompute: " recompute" };
  function rowOf(o, largest) {
    const row = make("tr", {
      class: "operation", style: toned(o.format), tabindex: "0",
    },
    make("td", { class: "number-cell" }, String(o.number)),
    make("td", {}, make("code", {}, o.primitive),
      make("span", { class: "again" }, (LEGS[o.leg] || PHASES[o.phase]) +
        (o.count > 1 ? " \u00d7" + o.count : ""))),
    make("td", {}, o.shown ? make("span", { class: "chip" }, shortType(o.shown)) : ""),
    make("td", { class: "where code" }, o.where),
    make("td", { class: "types code" }, ...types(o.inputs), "\u2192 ", ...types(o.outputs)),
    make("td", { class: "weight code" }, o.parameters.slice(0, 2).join(", ") +
      (o.parameters.length > 2 ? " +" + (o.parameters.length - 2) : "")),
    make("td", { class: "number-cell" },
      countText(o.executions) + " \u00d7 ?".repeat(o.unknown_loops)),
    make("td", { class: "number-cell" }, flopsText(o.flops), bar(o.flops, largest.flops)),
    make("td", { class: "number-cell" }, bytesText(o.bytes), bar(o.bytes, largest.bytes)),
    make("td", { class: "why" },
      o.finding ? make("span", { class: "finding" }, o.finding) : "",
      o.finding ? make("br") : "",
      (o.rule === "as written" ? "" : o.rule + ": ") + o.reason),
    make("td", { class: "source code" }, o.source));
    const open = () => {
      const next = row.nextElementSibling;
      if (next && next.classList.contains("more")) next.remove();
      else row.after(detailsOf(o));
    };
    row.addEventListener("click", () => { if (!String(getSelection())) open(); });
    row.addEventListener("keydown", (e) => { if (e.key === "Enter") open(); });
    return row;
  }
  function detailsOf(o) {
    const items = [
      ["operands", o.inputs.join("  ")], ["results", o.outputs.join("  ")],
      ["scope", o.scope], ["functions", o.function], ["inside of", o.inside.join(" > ")],
      ["pass", o.phase], ["leg", o.leg], ["format", o.format], ["computed in", o.precision],
      ["rule", o.rule], ["reason", o.reason],
      ["weights", o.parameters.join(", ")],
      ["FLOPs", o.flops === null ? "not known" : countText(o.flops)],
      ["bytes", countText(o.bytes)],
    ].filter((item) => item[1]);
    const calls = o.stack.slice().reverse().flatMap((line) => [line, make("br")]);
    return make("tr", { class: "more" }, make("td", { colspan: COLUMNS.length },
      make("dl", {}, ...items.flatMap(([name, value]) => [
        make("dt", {}, name), make("dd", { class: "code" }, value)]),
      make("dt", {}, "called by"), make("dd", { class: "code" }, ...calls))));
  }

  function showHead() {
    at("head").replaceChildren(...COLUMNS.map(([key, title]) => {
      const is = view.sort === key;
      return make("th", {
        scope: "col",
        "aria-sort": is ? (view.down ? "descending" : "ascending") : "none",
      }, make("button", {
        type: "button",
        onclick: () => {
          view.down = is ? (view.down ? "" : "1") : NUMERIC.has(key) && key !== "number" ? "1" : "";
          view.sort = key;
          changed();
        },
      }, title));
    }));
  }
  function showRows() {
    const largest = {
      flops: Math.max(1, ...rows.map((o) => o.flops || 0)),
      bytes: Math.max(1, ...rows.map((o) => o.bytes)),
    };
    at("rows").replaceChildren(...rows.slice(0, shownRows).map((o) => rowOf(o, largest)));
    if (!rows.length) {
      at("rows").append(make("tr", {}, make("td", { colspan: COLUMNS.length },
        "No operation is like that. Reset shows all of them.")));
    }
    at("more").hidden = rows.length <= shownRows;
    at("more").textContent = "Show more (" + countText(rows.length - shownRows) + " left)";
  }
  function showControls() {
    for (const id of ["text", "scope", "phase"]) {
      if (document.activeElement !== at(id)) at(id).value = view[id];
    }
    for (const id of ["findings", "costly", "group"]) at(id).checked = Boolean(view[id]);
    const chosen = view.precision ? view.precision.split(",") : [];
    for (const chip of at("precisions").children) {
      chip.setAttribute("aria-pressed", String(chosen.includes(chip.dataset.name)));
    }
  }
  function changed() {
    writeAddress();
    render();
  }
  function render() {
    shownRows = PAGE;
    const found = operations.filter(matches);
    rows = sorted(view.group ? grouped(found) : found);
    const flops = found.reduce((sum, o) => sum + (o.flops || 0), 0);
    const bytes = found.reduce((sum, o) => sum + o.bytes, 0);
    at("shown").textContent = countText(found.length) + " of " +
      countText(operations.length) + " operations in " + countText(rows.length) +
      " rows: " + flopsText(flops) + " FLOPs (" +
      shareText(totals.flops ? flops / totals.flops : 0) + "), " + bytesText(bytes);
    showControls();
    showHead();
    showRows();
  }

  // --- Start ------------------------------------------------------------------------

  const precisions = [...new Set(operations.map((o) => o.shown))].filter(Boolean);
  at("precisions").append(...precisions.map((name) => make("button", {
    class: "chip", type: "button", style: toned(name), "data-name": name,
    "aria-pressed": "false",
    onclick: () => {
      const chosen = new Set(view.precision ? view.precision.split(",") : []);
      if (chosen.has(name)) chosen.delete(name); else chosen.add(name);
      view.precision = [...chosen].join(",");
      changed();
    },
  }, name)));
  const prefixes = new Set();
  for (const o of operations) {
    const parts = o.where.split("/");
    for (let i = 1; i <= parts.length; i += 1) prefixes.add(parts.slice(0, i).join("/"));
  }
  at("scopes").append(...[...prefixes].filter(Boolean).sort().slice(0, 500)
    .map((name) => make("option", { value: name })));
  let waiting = 0;
  for (const id of ["text", "scope", "phase"]) {
    at(id).addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { view[id] = at(id).value; changed(); }, 120);
    });
  }
  for (const id of ["findings", "costly", "group"]) {
    at(id).addEventListener("change", () => {
      view[id] = at(id).checked ? "1" : "";
      changed();
    });
  }
  at("reset").addEventListener("click", () => { view = { ...DEFAULTS }; changed(); });
  at("more").addEventListener("click", () => { shownRows += 5 * PAGE; showRows(); });
  at("scheme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.scheme ? root.dataset.scheme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.scheme = isDark ? "light" : "dark";
  });
  addEventListener("hashchange", () => { readAddress(); render(); });
  showTotals();
  showPlaces();
  readAddress();
  render();
})();
