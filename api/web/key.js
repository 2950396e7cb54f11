// The API key, where the server asks for one: kept in this tab (sessionStorage), never anywhere else. Knows its dialog in
// base.html, and the one link that needs the key.

const SLOT = "sluice.key";
const found = (id) => document.getElementById(id);

/** The key, "" for none. */
export const key = () => sessionStorage.getItem(SLOT) ?? "";

/** Opens the dialog. `reason`: why, in the server's words. Resolves to whether there is another key now. */
export function askForKey(reason = "") {
  const dialog = found("key-dialog");
  if (dialog.open) return Promise.resolve(false);
  const before = key();
  found("key-reason").textContent = reason;
  found("key-reason").hidden = !reason;
  found("key-forget").hidden = !before;
  found("key").value = before;
  dialog.returnValue = "";
  dialog.showModal();
  found("key").select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "use") keep(found("key").value.trim());
      if (dialog.returnValue === "forget") keep("");
      found("key").value = "";
      resolve(key() !== before);
    }, { once: true });
  });
}

/** Wires the button in the page's head. `changed` is called when there is another key. */
export function wireKey(changed) {
  found("key-button").addEventListener("click", async () => {
    if (await askForKey()) changed();
  });
  document.querySelector('nav a[href="/docs"]').addEventListener("click", openWithKey);
  show();
}

function keep(value) {
  if (value) sessionStorage.setItem(SLOT, value);
  else sessionStorage.removeItem(SLOT);
  show();
}

function show() {
  found("key-button").textContent = key() ? "API key ✓" : "API key";
}

/** A link cannot carry a key, so the page it leads to is fetched with it and put in the place of this one. */
async function openWithKey(event) {
  if (!key() || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const address = event.currentTarget.href;
  const response = await fetch(address, { headers: { Authorization: `Bearer ${key()}` } });
  if (!response.ok) {
    location.assign(address);
    return;
  }
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  history.pushState(null, "", address);
  addEventListener("popstate", () => location.pathname === "/docs" || location.reload());
  document.replaceChild(document.adoptNode(page.documentElement), document.documentElement);
  scrollTo(0, 0);
}
