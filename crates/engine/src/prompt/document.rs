//! Documents as prompts hold them.

pub use refrain_documents::Document;

/// A document's text in the prompt: the title on a line of its own, the text, an empty line.
pub(super) fn prompt_text(document: &Document) -> String {
    let text = document.text.trim();
    match document.title.trim() {
        "" => format!("{text}\n\n"),
        title => format!("{title}\n{text}\n\n"),
    }
}
