//! Files of a request, read as documents within the server's limits.

use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use refrain::documents::ReadError;
use refrain::engine::Document;
use serde::Serialize;
use utoipa::ToSchema;

use super::extract::HeldBytes;
use crate::api_error::{ApiError, Result};
use crate::app::App;
use crate::tenant::Tenant;

/// Most characters of a file's name that are kept.
const MAX_NAME: usize = 255;

/// A document of a request.
#[derive(Debug)]
pub(super) enum Given {
    Document(Document),
    File(File),
}

/// A file of a request.
#[derive(Debug)]
pub(super) struct File {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
    /// Title that the request gives; may be empty.
    pub(super) title: String,
    /// Field of the request.
    pub(super) param: String,
}

/// A file that gave no document.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FileFailure {
    name: String,
    /// Field of the request that the file was in.
    param: String,
    /// The reason, and the remedy.
    message: String,
}

/// The documents of a request, its files read.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) documents: Vec<Document>,
    /// The bytes of the documents' titles and texts.
    pub(super) held: HeldBytes,
    pub(super) failures: Vec<FileFailure>,
}

/// Reads the files among the documents of a request, whose bytes are held.
///
/// # Errors
/// If there are too many documents or too much text, no file can be read and there is nothing beside, or reading takes too long.
pub(super) async fn read(app: &App, tenant: &Tenant, (given, held): (Vec<Given>, HeldBytes)) -> Result<Read> {
    let limit = app.state.options.max_documents_per_request;
    if given.is_empty() || given.len() > limit {
        return Err(ApiError::field("documents", format!("give 1 to {limit} documents")));
    }
    let read = read_files(app, tenant, (given, held)).await?;
    if read.documents.is_empty() {
        return Err(unreadable(&read.failures));
    }
    if read.documents.len() > limit {
        let message =
            format!("the files hold {} documents; send at most {limit} in a request", read.documents.len());
        return Err(ApiError::field("documents", message));
    }
    Ok(read)
}

/// Reads files one after the other on a thread that may block: each takes a turn of its key. The files count among the bytes in flight until the last is
/// read, and texts from the time at which they are there.
async fn read_files(app: &App, tenant: &Tenant, (given, mut held): (Vec<Given>, HeldBytes)) -> Result<Read> {
    let (mut texts, mut files) = (0, 0);
    for given in &given {
        match given {
            Given::Document(document) => texts += text_bytes(document),
            Given::File(file) => files += file.title.len() + file.bytes.len(),
        }
    }
    held.resize(texts)?;
    let files = Arc::new(held.beside(files)?);
    let (max_text, deadline) = (app.state.options.max_body, app.deadline(held.since()));
    let mut read = Read { documents: Vec::new(), held, failures: Vec::new() };
    for given in given {
        match given {
            Given::Document(document) => read.documents.push(document),
            Given::File(_) if Instant::now() >= deadline => {
                let message = "the files took too long to read; send fewer at a time";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
            }
            Given::File(file) => {
                let files = files.clone();
                let work = move |permit| Ok(file.read((permit, files)));
                match app.read_file(tenant.namespace(), deadline, work).await? {
                    Ok(documents) => {
                        texts += documents.iter().map(text_bytes).sum::<usize>();
                        read.documents.extend(documents);
                    }
                    Err(failure) => read.failures.push(failure),
                }
                // Compressed files may hold many times their bytes.
                if texts > max_text {
                    let message = format!(
                        "the documents hold more than {max_text} bytes of text; send fewer at a time"
                    );
                    return Err(ApiError::too_large(message));
                }
                read.held.resize(texts)?;
            }
        }
    }
    Ok(read)
}

/// Bytes of a document's title and text.
fn text_bytes(document: &Document) -> usize {
    document.title.len() + document.text.len()
}

impl File {
    /// The documents of the file, or why it has none. `held` is dropped once nothing is read any more.
    fn read(self, held: impl Send + 'static) -> std::result::Result<Vec<Document>, FileFailure> {
        let File { name, bytes, title, param } = self;
        let name = plain_name(&name);
        let message = match refrain::documents::read_holding(&bytes, &name, held) {
            Ok(documents) if documents.is_empty() => "has no text".to_owned(),
            Ok(mut documents) => {
                if let ([document], false) = (documents.as_mut_slice(), title.trim().is_empty()) {
                    document.title = title;
                }
                return Ok(documents);
            }
            Err(error) => reason(&error),
        };
        Err(FileFailure { name, param, message })
    }
}

/// The name without folders, and without characters that would break a line.
fn plain_name(name: &str) -> String {
    let name = name.rsplit(['/', '\\']).next().unwrap_or_default();
    name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect()
}

/// Why a file cannot be read. The file system has no part in it.
fn reason(error: &ReadError) -> String {
    match error {
        ReadError::Io(error) => ApiError::internal(error).message,
        error => error.to_string(),
    }
}

fn unreadable(failures: &[FileFailure]) -> ApiError {
    let lines: Vec<String> =
        failures.iter().map(|FileFailure { name, message, .. }| format!("{name}: {message}")).collect();
    let message = match lines.as_slice() {
        [line] => line.clone(),
        lines => format!("none of {} files could be read: {}", lines.len(), lines.join("\n")),
    };
    let param = failures.first().map(|failure| failure.param.clone());
    ApiError {
        param,
        code: Some("unreadable_file"),
        ..ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }
}
