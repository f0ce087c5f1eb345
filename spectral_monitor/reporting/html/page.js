"use strict";
// Draws the figures of the page and answers its controls. There is one state; every control changes it and redraws
// only what depends on it. Layers are known by their name as plotly writes it (`id`); `text` is the name as people do.
(async () => {
  const {steps, figures, layers = [], table = null} = JSON.parse(document.getElementById("data").textContent);
  const state = {query: "", families: true, lit: null, at: table ? table.now : 0};
  const text = new Map(layers);  // id -> name
  const matches = id => (text.get(id) ?? id).toLowerCase().includes(state.query);
  const byId = id => document.getElementById(id);

  // Colours that start with @ are those of the style sheet, which has light and dark ones.
  const dark = matchMedia("(prefers-color-scheme: dark)"), phone = matchMedia("(max-width: 600px)");
  const even = colours => colours.map((colour, i) => [i / (colours.length - 1), colour]);
  const scales = {
    diverging: () => even(dark.matches
      ? ["#58a6ff", "#2f6fb5", "#22405f", "#14171c", "#672f2b", "#b8473e", "#ff7b72"]
      : ["#174f94", "#4a90c9", "#b4d3e8", "#fafafa", "#f5bfa6", "#d9604c", "#a50f26"]),
    "diverging-reversed": () => scales.diverging().map(([at], i, all) => [at, all[all.length - 1 - i][1]]),
    sequential: () => even(["#2b1a55", "#3b4a8c", "#2a7a8e", "#28a87d", "#8fd145", "#fde725"]),
  };
  const style = getComputedStyle(document.documentElement);
  const colour = value => {
    if (Array.isArray(value)) return value.map(colour);
    if (typeof value !== "string" || !value.startsWith("@")) return value;
    const name = value.slice(1);
    return name in scales ? scales[name]() : style.getPropertyValue("--" + name).trim();
  };
  const filled = (value, key) => {
    if (/color(scale)?$/.test(key)) return colour(value);
    if (key === "x" && typeof value === "string") return steps[value];
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(item => filled(item, "")) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, filled(item, name)]));
  };
  const looks = () => {
    const axis = {gridcolor: colour("@line"), linecolor: colour("@line"), zerolinecolor: colour("@soft")};
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: {family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: colour("@ink")},
      hoverlabel: {align: "left", bgcolor: colour("@card"), bordercolor: colour("@soft"),
        font: {color: colour("@ink")}},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: colour("@soft"), activecolor: colour("@ink")},
      template: {layout: {xaxis: {...axis, zeroline: false}, yaxis: axis}},
    };
  };
  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};

  // The overview: rows that match the search, and dots at the step of the slider.
  const rowId = row => row.slice(1);  // a row begins with a character that keeps plotly from tripping over it
  const kept = (values, rows) => values.filter((_, i) => matches(rowId(rows[i])));
  const rowsOf = trace => ({...trace, y: kept(trace.y, trace.y), z: kept(trace.z, trace.y), meta: kept(trace.meta, trace.y),
    customdata: kept(trace.customdata, trace.y)
      .map((row, i) => row.map(cell => [kept(trace.meta, trace.y)[i], cell]))});  // an axis shortens names
  const now = () => table && state.at !== table.now ? state.at : -1;
  const dotsOf = trace => {
    const movable = now() >= 0 && trace.meta === "update_natural";
    const picked = values => kept(values, trace.y);
    const at = id => movable ? table.columns["vs. typical"][now()][table.rows.indexOf(id)] : null;
    const size = id => movable ? (table.columns.update_natural ?? [])[now()]?.[table.rows.indexOf(id)] : null;
    const off = movable ? new Set(table.off[now()].map(i => table.rows[i])) : null;
    return {...trace, x: movable ? picked(trace.y).map(row => at(rowId(row))) : picked(trace.x), y: picked(trace.y),
      customdata: picked(trace.customdata).map(cell => movable
        ? [cell[0], number(at(rowId(cell[0]))), number(size(rowId(cell[0])))] : cell),
      marker: {...trace.marker, size: picked(trace.marker.size),
        color: movable ? picked(trace.y).map(row => colour(off.has(rowId(row)) ? "@danger" : "@accent"))
          : picked(trace.marker.color)}};
  };
  const bandOf = trace => {  // two points and a gap for each row
    const whole = trace.y.map((row, i) => trace.y[i - i % 3]);
    return {...trace, x: kept(trace.x, whole), y: kept(trace.y, whole)};
  };
  const overview = figure => {
    const {layout} = figure, axis = layout.yaxis, rows = kept(axis.categoryarray, axis.categoryarray);
    const ticks = rows.length > 35 || !state.query ? kept(axis.tickvals, axis.tickvals) : rows;
    const label = row => axis.ticktext[axis.tickvals.indexOf(row)] ?? rowId(row).split(".").slice(-4).join(".");
    const lit = rows.findIndex(row => rowId(row) === state.lit);
    const mark = {type: "rect", xref: "paper", x0: 0, x1: 1, y0: lit - 0.5, y1: lit + 0.5,
      line: {color: colour("@ink"), width: 1.5}};
    const title = now() < 0 ? {} : {text: layout.annotations[0].text.replace(/step \d+/, `step ${table.steps[now()]}`)};
    return {
      data: figure.data.map(trace => trace.type === "heatmap" ? rowsOf(trace)
        : trace.mode === "markers" ? dotsOf(trace) : bandOf(trace)),
      layout: {...layout, annotations: [{...layout.annotations[0], ...title}, ...layout.annotations.slice(1)],
        shapes: lit < 0 ? layout.shapes : [...layout.shapes, mark],
        yaxis: {...axis, categoryarray: rows, range: [rows.length - 0.5, -0.5], tickvals: ticks,
          ticktext: ticks.map(label)}},
    };
  };

  // Charts: a line at the step of the slider; on a phone one below the other.
  const chart = ({data, layout}) => {
    const axes = Object.keys(layout).filter(key => key.startsWith("xaxis")), count = axes.length;
    const stacked = {...layout};
    if (phone.matches) {
      // Lengths in pixels: a chart, what is written between two of them, and the legend with a line for each entry.
      const {t, b} = layout.margin, plot = 220, gap = t + b, all = plot * count + gap * (count - 1);
      const legend = 30 + 19 * data.filter(trace => trace.showlegend).length;
      Object.assign(stacked, {height: t + all + b + legend, margin: {...layout.margin, l: 48, b: b + legend},
        legend: {...layout.legend, orientation: "h", y: -b / all, yanchor: "top", font: {size: 10}}});
      axes.forEach((key, k) => {
        const top = 1 - k * (plot + gap) / all;
        stacked[key] = {...layout[key], domain: [0, 1]};
        stacked["y" + key.slice(1)] = {...layout["y" + key.slice(1)], domain: [Math.max(0, top - plot / all), top]};
      });
    }
    if (now() >= 0) {
      stacked.shapes = axes.map(key => ({type: "line", xref: key.replace("axis", ""),
        yref: key.replace("xaxis", "y") + " domain", x0: table.steps[now()], x1: table.steps[now()], y0: 0, y1: 1,
        line: {color: colour("@soft"), width: 1, dash: "dot"}}));
    }
    return {data, layout: stacked};
  };
  const draw = async id => {
    const figure = {data: filled(figures[id].data, ""), layout: filled(figures[id].layout, "")};
    const {data, layout} = id === "overview-figure" ? overview(figure) : chart(figure);
    await Plotly.react(id, data, {...looks(), ...layout}, config);
    byId(id).querySelectorAll(".main-svg").forEach((svg, k) => {  // not all of the figure: it has buttons too
      if (k > 0 || !byId(id).dataset.words) return svg.setAttribute("aria-hidden", "true");
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", byId(id).dataset.words);
    });
  };

  // Curves are shown, hidden and highlighted by classes: nothing is drawn again.
  const tag = id => {
    const figure = byId(id);
    const bands = figures[id].data.some(trace => trace.uid?.startsWith("F"));
    figure.classList.toggle("families", bands && state.families && !state.query);
    figure.classList.toggle("dim", state.lit !== null);
    for (const trace of figures[id].data) {
      const line = trace.uid && figure.querySelector(".trace" + trace.uid);
      if (!line) continue;
      const layer = trace.uid.startsWith("L") ? trace.meta[0] : null;
      line.classList.add(layer === null ? "family" : "single");
      if (layer === null) continue;
      line.classList.toggle("kept", trace.uid.endsWith("k"));
      line.classList.toggle("lit", layer === state.lit);
      line.classList.toggle("filtered", !matches(layer));
    }
  };
  const charts = Object.keys(figures).filter(id => id !== "overview-figure");
  const light = id => {
    if (id === state.lit) return;
    state.lit = id;
    charts.forEach(tag);
    for (const row of document.querySelectorAll("tr[data-layer]")) row.classList.toggle("lit", row.dataset.layer === id);
    if (figures["overview-figure"]) {
      const {shapes} = overview({data: [], layout: filled(figures["overview-figure"].layout, "")}).layout;
      Plotly.relayout("overview-figure", {shapes});
    }
  };
  const pointed = ({points: [{data, y, customdata}]}) => data.type === "heatmap" ? rowId(y)
    : data.uid?.startsWith("L") ? data.meta[0] : data.mode === "markers" && customdata ? rowId(customdata[0]) : null;

  // The table: rows that match, sorted, at the step of the slider.
  const number = value => value === null || value === undefined ? "-"
    : value === 0 ? "0" : Math.abs(value) >= 0.1 && Math.abs(value) < 1000 ? String(Number(value.toPrecision(3)))
    : value.toExponential(1).replace("e+", "e");
  const rows = [...document.querySelectorAll("#layers tbody tr")];
  const written = new Map(rows.map(row => [row, [...row.cells].map(cell => cell.innerHTML)]));
  const fill = () => rows.forEach(row => {
    const place = table.rows.indexOf(row.dataset.layer), off = now() >= 0 && table.off[now()].includes(place);
    [...row.cells].forEach((cell, i) => {
      const column = table.columns[cell.dataset.quantity];
      if (now() < 0) cell.innerHTML = written.get(row)[i];  // as the page was written
      else if (column) cell.textContent = number(column[now()][place]);
      else if (cell.dataset.title === "state") cell.textContent = off ? "off" : "";
      else if (i === 0) cell.firstElementChild.classList.toggle("bad", off);
    });
  });
  const sort = (head, index) => {
    const descending = head.ariaSort !== "descending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.ariaSort = descending ? "descending" : "ascending";
    const key = row => {
      const said = row.cells[index].textContent.trim();
      return head.classList.contains("number") ? (parseFloat(said) || (said.startsWith("0") ? 0 : -Infinity)) : said;
    };
    const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, undefined, {numeric: true});
    rows.sort((a, b) => (descending ? -1 : 1) * compare(key(a), key(b)));
    rows[0]?.parentElement.append(...rows);
  };

  const found = () => {
    document.querySelectorAll("tr[data-layer]").forEach(row => { row.hidden = !matches(row.dataset.layer); });
    const count = layers.filter(([id]) => matches(id)).length;
    if (byId("found")) byId("found").textContent = state.query ? `${count} of ${layers.length} layers` : "";
  };
  const listen = () => {
    let waiting;
    byId("search")?.addEventListener("input", event => {
      state.query = event.target.value.trim().toLowerCase();
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        found();
        charts.forEach(tag);
        if (figures["overview-figure"]) draw("overview-figure");
      }, 120);
    });
    byId("single")?.addEventListener("change", event => { state.families = !event.target.checked; charts.forEach(tag); });
    byId("step")?.addEventListener("input", event => {
      state.at = Number(event.target.value);
      byId("at").textContent = event.target.ariaValueText = `step ${table.steps[state.at]}`;
      fill();
      if (figures["overview-figure"]) draw("overview-figure");
    });
    byId("step")?.addEventListener("change", async () => { for (const id of charts) await draw(id); });
    for (const row of document.querySelectorAll("tr[data-layer]")) {
      row.addEventListener("mouseenter", () => light(row.dataset.layer));
      row.addEventListener("mouseleave", () => light(null));
    }
    document.querySelectorAll("#layers th button").forEach(button => button.addEventListener("click", () => {
      sort(button.parentElement, button.parentElement.cellIndex);
    }));
    for (const id of Object.keys(figures)) {
      byId(id).on("plotly_hover", event => light(pointed(event)));
      byId(id).on("plotly_unhover", () => light(null));
      if (id !== "overview-figure") byId(id).on("plotly_afterplot", () => tag(id));
    }
  };
  const drawAll = async () => {
    for (const id of Object.keys(figures)) {
      await draw(id);
      if (id !== "overview-figure") tag(id);
      await new Promise(done => setTimeout(done));  // so that one can already scroll
    }
    document.body.dataset.drawn = dark.matches ? "dark" : "light";
  };
  dark.addEventListener("change", drawAll);
  phone.addEventListener("change", drawAll);
  await drawAll();
  listen();
})();
