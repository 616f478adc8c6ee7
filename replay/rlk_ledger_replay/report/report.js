"use strict";
(() => {
  const tip = document.getElementById("tip");
  let current = null;

  const text = (cell) => cell.getAttribute("data-tip");

  function show(cell) {
    if (current) current.classList.remove("at");
    current = cell;
    cell.classList.add("at");
    tip.textContent = text(cell);
    tip.hidden = false;
    const box = cell.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), window.innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 8 + tip.offsetHeight < window.innerHeight;
    tip.style.left = left + "px";
    tip.style.top = (below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + "px";
  }

  function hide() {
    if (current) current.classList.remove("at");
    current = null;
    tip.hidden = true;
  }

  for (const cell of document.querySelectorAll(".strip i[title]")) {
    cell.setAttribute("data-tip", cell.title);
    cell.removeAttribute("title");
  }

  for (const strip of document.querySelectorAll(".strip")) {
    const cells = Array.from(strip.querySelectorAll("i"));
    strip.tabIndex = 0;
    strip.addEventListener("pointerover", (event) => {
      const cell = event.target.closest("i");
      if (cell) show(cell);
    });
    strip.addEventListener("pointerleave", hide);
    strip.addEventListener("blur", hide);
    strip.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1 };
      if (event.key === "Escape") return hide();
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = cells.indexOf(current) + steps[event.key];
      show(cells[Math.min(Math.max(next, 0), cells.length - 1)]);
    });
  }
  window.addEventListener("scroll", hide, { passive: true });

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    for (const one of closed) one.open = true;
  });
  window.addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
})();
