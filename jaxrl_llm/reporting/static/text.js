"use strict";

/* Texts and numbers. What is packed is gzip in base64. */

async function unpack(id) {
  const letters = atob(document.getElementById(id).textContent), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4
    ? value.toExponential(Math.max(0, digits - 2))
    : size >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

function signed(value, digits = 3) {
  return (value > 0 ? "+" : "") + number(value, digits);
}

function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 10 ? `${value.toFixed(1)} s` : value >= 0.1 ? `${value.toFixed(2)} s` : `${number(value * 1000, 2)} ms`;
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

function shorten(text, length) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length <= length ? line : line.slice(0, length - 1) + "…";
}

function stepRange(steps) {
  /* [3, 4, 5, 9] -> "3–5, 9" */
  const parts = [];
  for (const step of [...steps].sort((a, b) => a - b)) {
    const last = parts[parts.length - 1];
    if (last && step <= last[1] + 1) last[1] = step;
    else parts.push([step, step]);
  }
  const shown = parts.slice(0, 8).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  return shown.join(", ") + (parts.length > 8 ? ", …" : "");
}
