// What every client is asked, and how it reports: one JSON object on standard output.

export const [url, model, prompt] = process.argv.slice(2);
export const fields = { model, prompt, max_tokens: 24, temperature: 0, seed: 1 };
// Ends the text early.
export const stop = ["."];
export const report = (found) => console.log(JSON.stringify(found));
