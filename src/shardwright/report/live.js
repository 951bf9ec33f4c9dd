// Polls the server every two seconds and replaces the page when the run has new events.
const open = (root) => new Set([...root.querySelectorAll("details[open]")].map((d) => `${d.closest("section")?.id}/${d.querySelector("summary").textContent}`));

async function refresh(state) {
  let known = state.version;
  try {
    const answer = await fetch("state", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    known = (await answer.json()).version;
    if (known !== state.version) {
      const page = await (await fetch("page", { cache: "no-store" })).text();
      const fresh = new DOMParser().parseFromString(page, "text/html");
      const shown = open(document);
      document.querySelector("main").replaceWith(document.adoptNode(fresh.querySelector("main")));
      for (const details of document.querySelectorAll("details")) {
        const name = `${details.closest("section")?.id}/${details.querySelector("summary").textContent}`;
        if (shown.has(name)) details.open = true;
      }
      attach(document);
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
  }
  state.version = known;
  setTimeout(refresh, 2000, state);
}

refresh({ version: document.querySelector("main").dataset.version });
