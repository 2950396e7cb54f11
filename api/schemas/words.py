"""What each field of a request does, in words for the OpenAPI document. Types and ranges come from the models.

A field without a line here fails a test.
"""

from __future__ import annotations

#: field -> what it does. Fields that two endpoints share mean the same on both; a field that does not has a line of its
#: own, `model.field`.
FIELD_WORDS = {
    "model": "Id or alias of a model. Absent: the server's default, or the only one that is served.",
    "prompt": "A text, several texts, token ids, or several lists of token ids; never put into a chat template. Special "
    "tokens written in a text are read as such, so untrusted text in a prompt can forge turns: see parse_special. An "
    "empty prompt starts from the begin-of-text token, if the model has one. Choices come prompt by prompt.",
    "TokenizeRequest.prompt": "A text, as a completion would take it: special tokens written in it are read as such. "
    "Instead of messages.",
    "max_tokens": "Most tokens to sample. Absent, 0 or negative: all that fit into the context. More than fit: 400 "
    "context_length_exceeded. 0 with echo and logprobs scores the prompt and samples nothing.",
    "max_completion_tokens": "Most tokens to sample, the reasoning included; comes before max_tokens. Absent, 0 or negative: all "
    "that fit into the context. More than fit: 400 context_length_exceeded.",
    "ChatRequest.max_tokens": "The same by its former name.",
    "fit_max_tokens": "Cut a max_tokens that does not fit, instead of refusing it, and say so in x-sluice-max-tokens.",
    "n": "Choices per prompt.",
    "ChatRequest.n": "Choices.",
    "best_of": "Candidates per prompt, of which the n with the highest mean logprob are sent. At least n; above 20 only "
    "if equal to n; more than n cannot be streamed. All candidates count in usage.",
    "echo": "Send the prompt before the completion, and with logprobs its scores. Not with suffix.",
    "logprobs": "Raw logprobs of the sampled tokens and of so many likeliest ones; 0: of the sampled ones only.",
    "ChatRequest.logprobs": "Send the raw logprobs of the sampled tokens.",
    "top_logprobs": "With logprobs: those of so many likeliest tokens too.",
    "suffix": "What follows the text to be written (fill in the middle). Only for models that have been trained for it.",
    "stop": "Texts that end the completion and are not sent. Looked for in generated text only.",
    "temperature": "0: always the likeliest token.",
    "top_p": "Sample among the likeliest tokens that together have this probability. 0: always the likeliest token.",
    "top_k": "Sample among so many likeliest tokens. 0 or -1: all.",
    "min_p": "Leave out tokens below this share of the likeliest one's probability.",
    "typical_p": "Locally typical sampling; 1 switches it off.",
    "presence_penalty": "Subtracted from the logits of tokens that were generated before.",
    "frequency_penalty": "Subtracted from the logits of tokens, for each time they were generated before.",
    "repetition_penalty": "Divides the logits of tokens of the prompt and of the generated text; 1 switches it off.",
    "seed": "The same seed gives the same text. Absent or -1: a new one for each request.",
    "logit_bias": "Token id -> added to its logit. -100 bans the token.",
    "min_tokens": "No end-of-text token and none of stop_token_ids before so many tokens. Stop strings end it earlier.",
    "ignore_eos": "Never sample the end-of-text token: go on up to max_tokens or a stop.",
    "stop_token_ids": "Token ids that end the completion.",
    "stream": "Send the completion as server-sent events while it is written.",
    "stream_options": "Only with stream. include_usage true: one more event with the usage; false: no usage; absent: "
    "the last finish event carries it. continuous_usage_stats: the usage so far in each event. include_obfuscation is "
    "accepted and does nothing.",
    "user": "A name for the end user; does nothing.",
    "add_special_tokens": "Put the begin-of-text token before a text if the model's tokenizer does so.",
    "parse_special": "Read special tokens that are written in a text as such. false: they are plain text.",
    "skip_special_tokens": "Leave control tokens out of the text.",
    "return_tokens_as_token_ids": "Write tokens in logprobs as token_id:N.",
    "response_format": "The form of the completion: any text, a JSON object, or JSON of a schema (draft 2020-12). strict: "
    "refuse a schema with a keyword that is not enforced while the text is written; else the finished text is checked, and "
    "sent as a whole. A text that does not have the form is an error (502), never a completion; one that max_tokens cuts "
    "has finish_reason length.",
    "regex": "A regular expression that the whole completion matches, without look-around and back references.",
    "grammar": "A grammar that the completion follows, in the Lark of llguidance.",
    "choice": "The completion is one of these texts. Of response_format, regex, grammar and choice, a request has one.",
    "service_tier": "flex: as batch work, which has the lanes that nobody else wants and gives way. auto, default and priority: interactive.",
    "priority": "Negative: ahead of your own other waiting requests.",
    "background": "Answer 202 with the job at once, and run to the end without the client. With stream: send the stream, "
    "and run on if the client leaves.",
    "webhook_url": "Who is told of the end of a background request, with a signed POST; one of the places that the server allows.",
    "BatchRequest.webhook_url": "Who is told of the batch's end, with a signed POST; one of the places that the server allows.",
    "ReplayRequest.webhook_url": "Who is told of the batch's end, with a signed POST; one of the places that the server allows.",
    "fanout": "Publish the frames on the store's public channel of this request.",
    "store": "false: the request's log and result are gone a minute after its end.",
    "enable_thinking": "Switch a thinking model's thinking on or off. An explicit off, in any of the fields that can "
    "say it, wins.",
    "chat_template": "Always refused: templates come with the models.",
    "chat_template_kwargs": "enable_thinking or thinking: the same switch.",
    "reasoning_effort": "none, off, minimal and disabled: thinking off; any other: on.",
    "reasoning": "effort: as reasoning_effort.",
    "thinking": "type disabled: thinking off; any other: on.",
    "ChatRequest.messages": "The chat. developer is system. Content is a text, or parts of type text; images, audio and files are "
    "refused. Assistant messages may bring their reasoning_content (or reasoning) and tool_calls; what becomes of them is the "
    "template's business.",
    "tools": "Functions that the model may call; the template tells it of them. Their parameters are JSON schemas of objects.",
    "tool_choice": "none: the model is not told of the tools, and its text is no call. auto (or absent): it decides.",
    "parallel_tool_calls": "false: the first call alone is one.",
    "functions": "Always refused: tools took their place.",
    "function_call": "Always refused: tool_choice took its place.",
    "metadata": "Accepted; does nothing.",
    "verbosity": "Accepted; does nothing.",
    "prediction": "Accepted; does nothing.",
    "modalities": "Only text.",
    "prompt_cache_key": "Accepted; does nothing: prompts that begin alike are found anyway.",
    "safety_identifier": "Accepted; does nothing.",
    "messages": "A chat, to be put into the model's chat template. Instead of prompt.",
    "add_generation_prompt": "With messages: end with the beginning of the assistant's turn.",
    "return_token_strs": "Send the text of each token as well.",
    "tokens": "Token ids.",
    "input_file_id": "The uploaded file with the requests: JSON Lines, each with custom_id, method, url and body.",
    "endpoint": "What all requests of the file call: their url.",
    "completion_window": "How long the batch may take, at most 24 hours: 24h, 90m, 30s. What is not done by then ends with "
    "batch_expired.",
    "BatchRequest.metadata": "Up to 16 texts of your own.",
    "ReplayRequest.metadata": "Up to 16 texts of your own.",
    "output_expires_after": "When the results are deleted, counted from the batch's end.",
    "file": "The file: UTF-8, one JSON object a line.",
    "purpose": "batch.",
    "expires_after[anchor]": "created_at, with expires_after[seconds].",
    "expires_after[seconds]": "When the file is deleted: seconds from now.",
}
