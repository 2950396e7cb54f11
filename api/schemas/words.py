"""What each field of a request does, in words for the OpenAPI document. Types and ranges come from the models.

A field without a line here fails a test.
"""

from __future__ import annotations

#: field -> what it does. One text a name: fields that two endpoints share mean the same on both.
FIELD_WORDS = {
    "model": "Id or alias of a model. Absent: the server's default, or the only one that is served.",
    "prompt": "A text, several texts, token ids, or several lists of token ids; never put into a chat template. Special "
    "tokens written in a text are read as such, so untrusted text in a prompt can forge turns: see parse_special. An "
    "empty prompt starts from the begin-of-text token, if the model has one. Choices come prompt by prompt.",
    "max_tokens": "Most tokens to sample. Absent, 0 or negative: all that fit into the context. More than fit: 400 "
    "context_length_exceeded. 0 with echo and logprobs scores the prompt and samples nothing.",
    "fit_max_tokens": "Cut a max_tokens that does not fit, instead of refusing it, and say so in x-sluice-max-tokens.",
    "n": "Choices per prompt.",
    "best_of": "Candidates per prompt, of which the n with the highest mean logprob are sent. At least n; above 20 only "
    "if equal to n; more than n cannot be streamed. All candidates count in usage.",
    "echo": "Send the prompt before the completion, and with logprobs its scores. Not with suffix.",
    "logprobs": "Raw logprobs of the sampled tokens and of so many likeliest ones; 0: of the sampled ones only.",
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
    "min_tokens": "No end of text before so many tokens.",
    "ignore_eos": "Go on after the end-of-text token, up to max_tokens.",
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
    "response_format": "The form of the completion: any text, a JSON object, or JSON of a schema.",
    "regex": "A regular expression that the completion matches.",
    "grammar": "A grammar that the completion follows.",
    "choice": "The completion is one of these texts.",
    "service_tier": "flex: as batch work, when nothing else waits. auto, default and priority: interactive.",
    "priority": "Negative: ahead of your own other waiting requests.",
    "background": "Answer 202 at once and run on without the client.",
    "fanout": "Publish the frames on the store's public channel of this request.",
    "store": "false: the request's log and result are gone a minute after its end.",
    "enable_thinking": "Switch a thinking model's thinking on or off. An explicit off, in any of the fields that can "
    "say it, wins.",
    "chat_template": "Always refused: templates come with the models.",
    "chat_template_kwargs": "enable_thinking or thinking: the same switch.",
    "reasoning_effort": "none, off, minimal and disabled: thinking off; any other: on.",
    "reasoning": "effort: as reasoning_effort.",
    "thinking": "type disabled: thinking off; any other: on.",
    "messages": "A chat, to be put into the model's chat template. Instead of prompt.",
    "add_generation_prompt": "With messages: end with the beginning of the assistant's turn.",
    "return_token_strs": "Send the text of each token as well.",
    "tokens": "Token ids.",
}
