"use strict";
// Beside the pointer, what the slice of time holds; one line through all pictures of a process. Tables sort by a click.
const tip = document.getElementById("tip");
for (const section of document.querySelectorAll("section")) {
  const pictures = [...section.querySelectorAll("svg[data-slices]")];
  for (const svg of pictures) {
    const { left, width, slices, texts } = JSON.parse(svg.dataset.slices);
    const hide = () => {
      tip.style.visibility = "hidden";
      for (const one of pictures) one.querySelector(".cursor").style.visibility = "hidden";
    };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const slice = Math.floor((x - left) / width * slices);
      if (slice < 0 || slice >= slices) return hide();
      const at = left + (slice + 0.5) / slices * width;
      for (const one of pictures) {
        const cursor = one.querySelector(".cursor");
        cursor.setAttribute("x1", at);
        cursor.setAttribute("x2", at);
        cursor.style.visibility = "visible";
      }
      tip.textContent = texts[slice];
      tip.style.visibility = "visible";
      tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 4) + "px";
      tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4) + "px";
    });
  }
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const cell = button.parentElement;
    const column = cell.cellIndex;
    const body = cell.closest("table").tBodies[0];
    const key = (row) => row.cells[column].dataset.value;
    const isText = cell.classList.contains("text");
    const compare = isText ? (a, b) => (key(a) < key(b) ? -1 : 1) : (a, b) => key(b) - key(a);
    body.append(...[...body.rows].sort(compare));
  });
}
