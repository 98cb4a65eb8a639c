// Tips of the charts, copy buttons, open details in print. Without it the tables still have every number.
"use strict";

const tip = document.getElementById("tip");
for (const mark of document.querySelectorAll(".chart [aria-roledescription='point']")) {
  const holder = mark.closest("a") ?? mark;
  const show = () => {
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const left = Math.min(at.left + at.width / 2 - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 10;
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    tip.style.top = `${(above < 0 ? at.bottom + 10 : above) + scrollY}px`;
  };
  const hide = () => { tip.hidden = true; };
  holder.addEventListener("mouseenter", show);
  holder.addEventListener("focus", show);
  holder.addEventListener("mouseleave", hide);
  holder.addEventListener("blur", hide);
}

// A mark's row may be in closed details.
const reveal = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", reveal);
reveal();

for (const button of document.querySelectorAll("[data-copy]")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

const closed = [...document.querySelectorAll("details:not([open])")];
addEventListener("beforeprint", () => closed.forEach((one) => one.setAttribute("open", "")));
addEventListener("afterprint", () => closed.forEach((one) => one.removeAttribute("open")));
