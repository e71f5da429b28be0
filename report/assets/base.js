"use strict";
// Data blocks and the theme. All text of a run enters the page through textContent, never as markup.

const byId = (id) => document.getElementById(id);

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

async function unpack(id) {
  const text = atob(byId(id).textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const unpackJson = async (id) => JSON.parse(new TextDecoder().decode(await unpack(id)));

const themeListeners = [];

function applyTheme() {
  const chosen = document.documentElement.dataset.choice;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = byId("theme");
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-label", `Switch to the ${dark ? "light" : "dark"} theme`);
  for (const listener of themeListeners) listener();
}

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.choice = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
applyTheme();
