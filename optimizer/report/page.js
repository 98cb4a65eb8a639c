// Tips of the charts, open details in print. Without it the tables still have every number.
"use strict";

const tip = document.getElementById("tip");
const hide = () => { tip.hidden = true; };
const show = (mark, words) => {
  tip.textContent = words;
  tip.hidden = false;
  const at = mark.getBoundingClientRect();
  const left = Math.min(at.left + at.width / 2 - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 10;
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${(above < 0 ? at.bottom + 10 : above) + scrollY}px`;
};
const listen = (holder, mark, words) => {
  for (const event of ["mouseenter", "focus"]) holder.addEventListener(event, () => show(mark, words()));
  for (const event of ["mouseleave", "blur"]) holder.addEventListener(event, hide);
};
for (const mark of document.querySelectorAll(".chart [aria-roledescription='point']")) {
  listen(mark.closest("a") ?? mark, mark, () => mark.getAttribute("aria-label"));
}

// A mark's row may be in closed details.
const reveal = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", reveal);
reveal();

const closed = [...document.querySelectorAll("details:not([open])")];
addEventListener("beforeprint", () => closed.forEach((one) => one.setAttribute("open", "")));
addEventListener("afterprint", () => closed.forEach((one) => one.removeAttribute("open")));
