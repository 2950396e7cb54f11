// Tables whose rows stay the same elements while their texts change, so that focus and selection stay where they are.

/** Shows `rows`, {key, cells}, in a tbody. A cell is text, null for nothing, or a function that fills its td: called with
 *  (td, isNew) each time. `empty`: what stands there without rows. */
export function showRows(body, rows, empty) {
  const labels = [...body.parentElement.tHead.rows[0].cells].map((cell) => [cell.textContent, cell.className]);
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const shown = rows.map(({ key, cells }) => {
    const before = known.get(key);
    const row = before ?? newRow(key, labels);
    cells.forEach((cell, index) => fill(row.cells[index], cell, !before));
    return row;
  });
  if (!shown.length) shown.push(known.get("") ?? emptyRow(labels.length, empty));
  for (const row of [...body.rows]) if (!shown.includes(row)) row.remove();
  shown.forEach((row, index) => {
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
}

function newRow(key, labels) {
  const row = document.createElement("tr");
  row.dataset.key = key;
  for (const [label, className] of labels) {
    const cell = row.insertCell();
    cell.className = className;
    cell.dataset.label = label;
  }
  return row;
}

function emptyRow(columns, words) {
  const row = document.createElement("tr");
  row.dataset.key = "";
  const cell = row.insertCell();
  cell.colSpan = columns;
  cell.className = "empty";
  cell.textContent = words;
  return row;
}

function fill(cell, content, isNew) {
  if (typeof content === "function") content(cell, isNew);
  else setText(cell, content ?? "");
}

/** Sets a text if it is another one. */
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}
