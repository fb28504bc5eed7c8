/* Elements. Every text becomes a text node, so that no answer can be markup. */

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
}

function byId(id) {
  return document.getElementById(id);
}

function choice(label, options, value, onchange) {
  /* options: [value, text] pairs */
  const select = h("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", { class: "field" }, h("span", {}, label), select);
}

function searchBox(label, placeholder, value, oninput) {
  let waiting;
  const input = h("input", {
    type: "search", placeholder, value, "aria-label": label,
    oninput: (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => oninput(event.target.value), 120);
    },
  });
  return h("label", { class: "field grow" }, h("span", {}, label), input);
}

function check(label, checked, onchange) {
  return h("label", { class: "check" },
    h("input", { type: "checkbox", checked, onchange: (event) => onchange(event.target.checked) }), label);
}

function segments(label, options, value, onchange) {
  /* options: [value, text, disabled] */
  const buttons = options.map(([key, text, disabled]) => h("button", {
    type: "button", disabled: Boolean(disabled), "aria-pressed": String(key === value), "data-value": key,
    title: disabled || "",
    onclick: (event) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      onchange(key);
    },
  }, text));
  return h("div", { class: "field" }, h("span", {}, label), h("div", { class: "segments", role: "group", "aria-label": label }, buttons));
}

function focusAgain(holder, label) {
  /* Give a field that was made anew the focus, with the cursor at its end. */
  const field = holder.querySelector(`[aria-label="${label}"]`);
  field?.focus();
  if (field?.type === "search") field.setSelectionRange(field.value.length, field.value.length);
}

function note(...children) {
  return h("p", { class: "note" }, ...children);
}
