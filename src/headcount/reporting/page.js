"use strict";
// Tables are sorted by a click on a column's head; values of figures appear on hover and on tap.
const number = (text) => parseFloat(text.replace("−", "-").replaceAll(",", ""));
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const text = (row) => row.cells[column].textContent.trim();
    const numeric = [...body.rows].every((row) => /^([+−-]?[\d.]|–?$)/.test(text(row)));
    const button = document.createElement("button");
    button.className = "sort";
    button.setAttribute("aria-label", `sort by ${head.textContent.trim()}`);
    head.append(button);
    head.addEventListener("click", (event) => {
      if (event.target.closest("a")) return;
      const first = numeric ? "descending" : "ascending", second = numeric ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const compare = (a, b) => numeric ? number(a) - number(b) : a.localeCompare(b);
      const known = (t) => t !== "" && t !== "–";  // what is not known comes last
      body.append(...[...body.rows].sort((r, s) => {
        const [a, b] = [text(r), text(s)];
        return known(a) && known(b) ? sign * compare(a, b) : known(b) - known(a);
      }));
    });
  });
}
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("svg.plot title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const box = mark.getBoundingClientRect(), above = box.top - tip.offsetHeight - 6;
  const left = box.left + (box.width - tip.offsetWidth) / 2;
  tip.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${above < 0 ? box.bottom + 6 : above}px`;
});
