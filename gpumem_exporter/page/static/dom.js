// Elements. Names from reports are only ever inserted as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** Create an element. Attributes that are null are left out; children that are not nodes become text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set the text only if it differs: an unchanged node needs no layout, and no screen reader reads it again. */
export function setText(element, text) {
  if (element.shownText === text) return; // reading hundreds of texts from the document is slow
  element.shownText = text;
  element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

const GLIDE = { duration: 250, easing: "ease-out" };
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** Give `parent` these children in this order; elements that are in place are not touched. With `glide`, others glide there. */
export function arrange(parent, elements, { glide = false } = {}) {
  const before = [...parent.children];
  if (before.length === elements.length && before.every((child, i) => child === elements[i])) return;
  const tops = glide && !still.matches ? before.map((child) => child.getBoundingClientRect().top) : [];
  if (glide) for (const animation of document.getAnimations()) if (animation.effect.target.parentNode === parent) animation.cancel();
  const wanted = new Set(elements);
  for (const child of before) if (!wanted.has(child)) child.remove();
  let next = parent.firstElementChild;
  for (const element of elements) {
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  const moved = tops.map((top, i) => [before[i], wanted.has(before[i]) ? top - before[i].getBoundingClientRect().top : 0]);
  for (const [element, pixels] of moved) if (pixels !== 0) element.animate([{ transform: `translateY(${pixels}px)` }, { transform: "none" }], GLIDE);
}

/** Keeps one view for each item of a list: `create(key)` makes it, `view.update(item)` shows the item. */
export class Views {
  constructor(create) {
    this.create = create;
    this.views = new Map();
  }

  /** Update the views of these items, forget the views of others, and return the views in the order of the items. */
  update(items, keyOf) {
    const before = this.views;
    this.views = new Map();
    for (const item of items) {
      const key = keyOf(item);
      const view = before.get(key) ?? this.create(key);
      view.update(item);
      this.views.set(key, view);
    }
    return [...this.views.values()];
  }
}

/** Return whether the pointer or the keyboard is in an element: nothing in it may move then. */
export function isInUse(element) {
  return element.matches(":hover") || element.querySelector(":focus-visible") !== null;
}

/** Replace the children only if the content differs from the last one. */
export function refill(element, content, build) {
  const text = JSON.stringify(content);
  if (element.shownContent === text) return;
  element.shownContent = text;
  element.replaceChildren(...build(content));
}
