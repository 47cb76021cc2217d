//! A response's output as it grows, and the events that tell of it.

use super::events::EventBody;
use super::items::{OutputItem, OutputText};
use crate::api::parts::Part;
use crate::random::random_id;

/// The output as it grows.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) items: Vec<OutputItem>,
    /// Whether the last item still grows.
    is_open: bool,
}

impl Output {
    /// Adds a part of the answer; gives the events that tell of it.
    pub(super) fn push(&mut self, part: Part) -> Vec<EventBody> {
        let mut events = Vec::new();
        match part {
            Part::Text(text) if text.is_empty() => {}
            Part::Text(text) => {
                if !(self.is_open && matches!(self.items.last(), Some(OutputItem::Message { .. }))) {
                    self.close("completed", &mut events);
                    self.open_message(&mut events);
                }
                self.add_text(text, &mut events);
            }
            Part::Call { id, name, .. } => {
                self.close("completed", &mut events);
                self.open(
                    OutputItem::FunctionCall {
                        id: random_id("fc_"),
                        call_id: id,
                        name,
                        arguments: String::new(),
                        status: "in_progress",
                    },
                    &mut events,
                );
            }
            Part::Arguments { json, .. } => {
                let output_index = self.last_index();
                if let Some(OutputItem::FunctionCall { id, arguments, .. }) = self.items.last_mut() {
                    arguments.push_str(&json);
                    let item_id = id.clone();
                    events.push(EventBody::ArgumentsDelta { item_id, output_index, delta: json });
                }
            }
        }
        events
    }

    /// Ends the output: with `status` its last item if that still grows. Without any item it becomes an empty message.
    pub(super) fn finish(&mut self, status: &'static str) -> Vec<EventBody> {
        let mut events = Vec::new();
        if self.items.is_empty() {
            self.open_message(&mut events);
        }
        self.close(status, &mut events);
        events
    }

    fn last_index(&self) -> usize {
        self.items.len().saturating_sub(1)
    }

    fn open(&mut self, item: OutputItem, events: &mut Vec<EventBody>) {
        self.items.push(item.clone());
        self.is_open = true;
        events.push(EventBody::ItemAdded { output_index: self.last_index(), item });
    }

    fn open_message(&mut self, events: &mut Vec<EventBody>) {
        let id = random_id("msg_");
        let (status, role, content) = ("in_progress", "assistant", Vec::new());
        self.open(OutputItem::Message { id: id.clone(), status, role, content }, events);
        let part = OutputText::new(String::new());
        if let Some(OutputItem::Message { content, .. }) = self.items.last_mut() {
            content.push(part.clone());
        }
        let (output_index, content_index) = (self.last_index(), 0);
        events.push(EventBody::PartAdded { item_id: id, output_index, content_index, part });
    }

    fn add_text(&mut self, delta: String, events: &mut Vec<EventBody>) {
        let (output_index, content_index) = (self.last_index(), 0);
        if let Some(OutputItem::Message { id, content, .. }) = self.items.last_mut()
            && let Some(part) = content.last_mut()
        {
            part.text.push_str(&delta);
            let (item_id, logprobs) = (id.clone(), Vec::new());
            events.push(EventBody::TextDelta { item_id, output_index, content_index, delta, logprobs });
        }
    }

    /// Ends the last item if it still grows.
    fn close(&mut self, end: &'static str, events: &mut Vec<EventBody>) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let (output_index, content_index) = (self.last_index(), 0);
        let Some(item) = self.items.last_mut() else { return };
        match item {
            OutputItem::Message { id, status, content, .. } => {
                *status = end;
                for part in content {
                    let (item_id, text, logprobs) = (id.clone(), part.text.clone(), Vec::new());
                    events.push(EventBody::TextDone { item_id, output_index, content_index, text, logprobs });
                    let (item_id, part) = (id.clone(), part.clone());
                    events.push(EventBody::PartDone { item_id, output_index, content_index, part });
                }
            }
            OutputItem::FunctionCall { id, name, arguments, status, .. } => {
                *status = end;
                let (item_id, name, arguments) = (id.clone(), name.clone(), arguments.clone());
                events.push(EventBody::ArgumentsDone { item_id, output_index, name, arguments });
            }
        }
        events.push(EventBody::ItemDone { output_index, item: item.clone() });
    }
}
