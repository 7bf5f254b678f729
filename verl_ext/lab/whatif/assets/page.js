// SPDX-License-Identifier: Apache-2.0

// Cells of shares and correlations: the larger the number, the deeper the colour; red below zero.
for (const cell of document.querySelectorAll(".heat td")) {
  const value = parseFloat(cell.textContent);
  if (Number.isFinite(value)) {
    const depth = Math.min(1, Math.abs(value)) * 0.65;
    cell.style.backgroundColor = value < 0 ? `rgba(217, 72, 1, ${depth})` : `rgba(8, 81, 156, ${depth})`;
    if (depth > 0.45) cell.style.color = "white";
  }
}

// A click on a column's name sorts by it, the smallest first; what has no number comes last.
for (const table of document.querySelectorAll(".sort")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.addEventListener("click", () => {
      const value = (row) => {
        const number = parseFloat(row.cells[column].textContent);
        return Number.isFinite(number) ? number : Infinity;
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => value(a) - value(b));
      table.tBodies[0].append(...rows);
    });
  });
}
