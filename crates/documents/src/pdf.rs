//! PDF: the text of a document as Markdown.
//!
//! A PDF says where each glyph is drawn and knows neither words nor lines. `interpret` runs the drawing operations for the text they
//! show, `layout` finds columns, lines and tables by position, `blocks` makes paragraphs, lists and headings of lines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use hayro_syntax::{DecryptionError, LoadPdfError, Pdf};

use crate::document::Document;
use crate::error::ReadError;
use crate::limits::{MAX_PAGES, PDF_STACK_BYTES};
use crate::markdown::collapse;
use crate::origin::Origin;

mod annotations;
mod arrays;
mod bidi;
mod bitmaps;
mod blocks;
mod characters;
mod columns;
mod expand;
mod guard;
mod inflate;
mod interpret;
mod layout;
mod line;
mod names;
mod running;
mod search;
mod state;
mod strings;
mod tables;
mod widths;

/// Reads a PDF on a thread of its own, so that neither its depth nor its time are the caller's. `held` is dropped once the thread
/// no longer reads, which may be after the time.
pub(crate) fn read(
    bytes: &[u8],
    stem: &str,
    origin: Origin,
    held: impl Send + 'static,
) -> Result<Document, ReadError> {
    let (bytes, stem) = (bytes.to_vec(), stem.to_owned());
    within(origin.time(), held, move |stop| parse(bytes, &stem, origin, stop))
}

fn within<T: Send + 'static>(
    time: Duration,
    held: impl Send + 'static,
    work: impl FnOnce(&Arc<AtomicBool>) -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ReadError> {
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = channel();
    let stopped = Arc::clone(&stop);
    let thread =
        std::thread::Builder::new().name("pdf".to_owned()).stack_size(PDF_STACK_BYTES).spawn(move || {
            let done = work(&stopped);
            drop(held);
            // The receiver is gone where the time was up.
            let _ = sender.send(done);
        })?;
    match receiver.recv_timeout(time) {
        Ok(done) => done,
        Err(RecvTimeoutError::Timeout) => {
            stop.store(true, Ordering::Relaxed);
            Err(ReadError::late(time))
        }
        Err(RecvTimeoutError::Disconnected) => {
            // The thread ended without an answer: it panicked, which its handle says.
            let _ = thread.join();
            Err(malformed("its structure contradicts itself"))
        }
    }
}

/// The bytes of a file, which are gone once reading it is to stop: `hayro-syntax` looks at no flag, and finds no further object then.
struct Stoppable {
    bytes: Vec<u8>,
    stop: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Stoppable {
    fn as_ref(&self) -> &[u8] {
        if self.stop.load(Ordering::Relaxed) { &[] } else { &self.bytes }
    }
}

fn parse(
    mut bytes: Vec<u8>,
    stem: &str,
    origin: Origin,
    stop: &Arc<AtomicBool>,
) -> Result<Document, ReadError> {
    guard::check_streams(&mut bytes, origin, stop)?;
    search::check(&bytes, stop)?;
    let bytes = Stoppable { bytes, stop: Arc::clone(stop) };
    let pdf = Pdf::new(Arc::new(bytes)).map_err(|error| match error {
        LoadPdfError::Decryption(DecryptionError::PasswordProtected) => ReadError::Encrypted,
        LoadPdfError::Decryption(_) => {
            ReadError::Unsupported { format: "this kind of encryption", remedy: "save it without a password" }
        }
        LoadPdfError::Invalid => malformed("neither pages nor objects can be found"),
    })?;
    if pdf.pages().len() > MAX_PAGES {
        return Err(ReadError::TooLarge { what: "pages", limit: format!("{MAX_PAGES}") });
    }
    let mut interpreter = interpret::Interpreter::new(stop);
    let mut pages = Vec::new();
    for page in pdf.pages().iter() {
        pages.push(layout::lines(interpreter.page(page)?));
        if stop.load(Ordering::Relaxed) {
            return Err(ReadError::late(origin.time()));
        }
    }
    if interpreter.is_unknown() {
        return Err(ReadError::Unsupported {
            format: "a PDF whose fonts do not tell the characters of most of its glyphs",
            remedy: "recognise its text anew, for example with ocrmypdf --force-ocr",
        });
    }
    let (text, heading) = blocks::write(pages)?.finish()?;
    if text.is_empty() {
        return Err(ReadError::NoText { remedy: "scanned pages need OCR first, for example with ocrmypdf" });
    }
    let title = pdf
        .metadata()
        .title
        .as_deref()
        .map(|title| collapse(&strings::string(title)))
        .filter(|title| strings::is_title(title));
    Ok(Document { title: title.or(heading).unwrap_or_else(|| stem.to_owned()), text })
}

fn malformed(reason: impl ToString) -> ReadError {
    ReadError::malformed("PDF", reason)
}

#[cfg(test)]
mod tests;
