"use strict";
// Draws the timeline of the chosen step and the orders of its stages from the embedded data.
// A task is [kind, microbatch, start, length, arrived, ready, chosen, launched, sent] in
// microseconds from the step's start (null where there is none), a wait [cause, start, length,
// text].
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const state = { step: 0, zoom: 1 };

  const short = (value) => Number(value.toPrecision(4));
  const time = (us) =>
    us >= 1e6 ? `${short(us / 1e6)} s` : us >= 1e3 ? `${short(us / 1e3)} ms` : `${short(us)} µs`;

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function ticks(span, count) {
    const rough = span / count;
    const base = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((m) => m * base).find((u) => u >= rough);
    return Array.from({ length: Math.floor(span / unit) + 1 }, (_, i) => i * unit);
  }

  function drawLanes() {
    const step = data.steps[state.step];
    const lanes = step.lanes;
    const height = lanes.length > 40 ? 11 : lanes.length > 16 ? 16 : 26;
    const gap = lanes.length > 16 ? 2 : 6;
    const top = 20;
    const width = Math.max(300, Math.floor(at("scroll").clientWidth * state.zoom));
    const x = (us) => (us / step.span_us) * width;
    const svg = at("lanes");
    svg.replaceChildren();
    svg.setAttribute("width", width);
    svg.setAttribute("height", top + lanes.length * (height + gap));
    for (const us of ticks(step.span_us, Math.max(3, width / 130))) {
      add(svg, "line", { class: "grid", x1: x(us), x2: x(us), y1: 14, y2: top + lanes.length * (height + gap) });
      add(svg, "text", { x: Math.min(x(us) + 3, width - 44), y: 11 }, time(us));
    }
    lanes.forEach((lane, l) => {
      const y = top + l * (height + gap);
      lane.waits.forEach((wait, w) => {
        add(svg, "rect", {
          class: `wait ${data.causes[wait[0]]}`, x: x(wait[1]), width: Math.max(x(wait[2]), 0.3),
          y: y + height * 0.3, height: height * 0.4, "data-lane": l, "data-wait": w,
        });
      });
      lane.tasks.forEach((task, t) => {
        const wide = x(task[3]);
        add(svg, "rect", {
          class: `task ${task[0]}`, x: x(task[2]), width: Math.max(wide - 0.6, 0.6), y, height,
          rx: wide > 6 ? 2 : 0, "data-lane": l, "data-task": t,
        });
        if (wide > 15 && height > 12) {
          add(svg, "text", { class: "n", x: x(task[2]) + wide / 2, y: y + height / 2 + 4 }, task[1]);
        }
      });
    });
    at("labels").replaceChildren(...lanes.map((lane) => {
      const label = document.createElement("div");
      label.textContent = lane.name;
      label.style.cssText = `height:${height + gap}px;line-height:${height}px;font-size:${Math.min(12, height)}px`;
      return label;
    }));
    at("about").textContent = step.about;
  }

  function drawOrders() {
    const step = data.steps[state.step];
    at("orders").replaceChildren(...step.orders.map((order) => {
      const row = document.createElement("div");
      row.className = "row";
      const name = document.createElement("div");
      name.className = "name";
      name.textContent = `${order.name}: ${order.over.length} of ${order.ran.length} overtook`;
      const strips = document.createElement("div");
      strips.className = "strips";
      const high = step.orders.length > 16 ? 6 : 11;
      const svg = add(strips, "svg", {
        width: "100%", height: 2 * high + 2, viewBox: `0 0 ${order.ran.length} ${2 * high + 2}`,
        preserveAspectRatio: "none",
      });
      const over = new Set(order.over);
      [order.wanted, order.ran].forEach((tasks, which) => tasks.forEach((task, i) => {
        add(svg, "rect", {
          class: `cell ${task[0]}`, x: i + 0.04, width: 0.92, y: which * (high + 2), height: high,
          opacity: which && over.has(i) ? 1 : which ? 0.45 : 0.8,
          "data-tip": `${which ? "ran" : "wanted"} at place ${i + 1}: ${task[0]} of microbatch ${task.slice(1)}` +
            (which && over.has(i) ? "\novertook one that was wanted earlier" : ""),
        });
      }));
      row.append(name, strips);
      return row;
    }));
  }

  function choose(index) {
    state.step = index;
    [...at("steps").children].forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    drawLanes();
    drawOrders();
  }

  function zoom(factor) {
    const scroll = at("scroll");
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
    state.zoom = factor === 0 ? 1 : Math.min(64, Math.max(1, state.zoom * factor));
    drawLanes();
    scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
  }

  function words(target) {
    if (target.dataset.tip) return target.dataset.tip;
    const lane = data.steps[state.step].lanes[target.dataset.lane];
    if (lane === undefined) return "";
    if (target.dataset.wait !== undefined) {
      const [cause, start, length, text] = lane.waits[target.dataset.wait];
      return `idle: ${data.causes[cause]}, ${time(length)}\nfrom ${time(start)}${text ? `\n${text}` : ""}`;
    }
    const [kind, microbatch, start, length, arrived, ready, chosen, launched, sent] = lane.tasks[target.dataset.task];
    const lines = [`${kind}${lane.stage}.${microbatch}, ${time(length)}`];
    const moments = { arrived, ready, chosen, launched, started: start, finished: start + length, sent };
    for (const name in moments) {
      const us = moments[name];
      if (us !== null) lines.push(`${name} ${us < 0 ? "−" : ""}${time(Math.abs(us))}`);
    }
    return lines.join("\n");
  }

  document.addEventListener("pointermove", (event) => {
    const tip = at("tip");
    const text = event.target instanceof Element ? words(event.target) : "";
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  });

  at("steps").append(...data.steps.map((step, index) => {
    const button = document.createElement("button");
    button.textContent = step.name;
    button.addEventListener("click", () => choose(index));
    return button;
  }));
  at("in").addEventListener("click", () => zoom(2));
  at("out").addEventListener("click", () => zoom(0.5));
  at("fit").addEventListener("click", () => zoom(0));
  addEventListener("resize", drawLanes);
  choose(0);
  document.body.dataset.drawn = "true";
})();
