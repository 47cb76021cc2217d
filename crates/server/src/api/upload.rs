//! The body of `POST /v1/documents`: JSON, or a form with files.

use std::fmt;

use axum::body::Body;
use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest, Multipart, Request};
use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use refrain::engine::Document;
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use serde_json::Value;
use utoipa::ToSchema;

use super::extract::{HeldBytes, Json, has_type, receive};
use super::files::{File, Given};
use super::request::{check_model, fusion_method, null_is_default, read_from_objects};
use crate::api_error::{ApiError, Result};
use crate::app::App;

/// One document (`text`, `title`), one file (`file`), or several of both (`documents`).
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct AddDocumentsRequest {
    /// Name of the model that the documents are prefilled for, as in `/v1/models`.
    model: Option<String>,
    /// Title of the document. It replaces the title in a file that holds one document.
    #[serde(default, deserialize_with = "null_is_default")]
    title: String,
    text: Option<String>,
    file: Option<FileUpload>,
    documents: Option<Vec<TextOrFile>>,
    /// Whether progress is sent as server-sent events.
    #[serde(default, deserialize_with = "null_is_default")]
    stream: bool,
    /// Fusion method that the documents are prefilled for; the server's default if there is none.
    #[schema(schema_with = fusion_method)]
    method: Option<Value>,
}

/// A document as a text or as a file.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct TextOrFile {
    /// Title of the document. It replaces the title in a file that holds one document.
    #[serde(default, deserialize_with = "null_is_default")]
    title: String,
    text: Option<String>,
    file: Option<FileUpload>,
}

/// A file of text, Markdown, HTML, PDF, DOCX or JSONL.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct FileUpload {
    /// Name of the file. Its extension tells the format where the bytes do not, and it is the title of a document that has none.
    name: String,
    /// Bytes of the file, in base64.
    #[serde(deserialize_with = "from_base64")]
    #[schema(value_type = String, format = Byte)]
    data: Vec<u8>,
}

read_from_objects!(AddDocumentsRequest, TextOrFile, FileUpload);

/// Files as parts of a form, as `curl -F file=@handbook.pdf` sends them.
#[derive(Debug, Default, ToSchema)]
pub(super) struct FileForm {
    /// One part a file, each with its file name.
    #[schema(value_type = Vec<String>, format = Binary)]
    file: Vec<FileUpload>,
    /// Fusion method that the documents are prefilled for; the server's default if there is none.
    method: Option<String>,
    /// Whether progress is sent as server-sent events.
    #[schema(required = false)]
    stream: bool,
}

/// Documents and files to add.
#[derive(Debug)]
pub(super) struct Upload {
    pub(super) given: Vec<Given>,
    /// The bytes of the body.
    pub(super) held: HeldBytes,
    pub(super) stream: bool,
    pub(super) method: Option<Value>,
}

impl FromRequest<App> for Upload {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, app: &App) -> Result<Upload> {
        if !has_type(request.headers(), "multipart/form-data") {
            let Json(request, held) = Json::<AddDocumentsRequest>::from_request(request, app).await?;
            check_model(request.model.as_deref(), &app.state.options.served_model_name)?;
            return request.into_upload(held);
        }
        // A browser lets pages of other origins send forms without a preflight; a gateway has checked it.
        if app.signed_tenant(request.headers()).is_err() {
            app.state.options.check_origin(request.headers())?;
        }
        // The form is parsed after the body has passed the server's limits.
        let (headers, tenant) = (request.headers().clone(), app.tenant(request.headers())?);
        let (bytes, held) = receive(request, app, &tenant).await?;
        let mut received = Request::new(Body::from(bytes));
        *received.headers_mut() = headers;
        DefaultBodyLimit::disable().apply(&mut received);
        let form =
            Multipart::from_request(received, app).await.map_err(|error| malformed(error.body_text()))?;
        Ok(FileForm::read(form).await?.into_upload(held))
    }
}

impl AddDocumentsRequest {
    fn into_upload(self, held: HeldBytes) -> Result<Upload> {
        let AddDocumentsRequest { title, text, file, documents, stream, method, .. } = self;
        let given = match (text, file, documents) {
            (None, None, Some(documents)) => {
                let given = |(index, document): (usize, TextOrFile)| {
                    let TextOrFile { title, text, file } = document;
                    given(&format!("documents[{index}]"), title, text, file)
                };
                documents.into_iter().enumerate().map(given).collect::<Result<_>>()?
            }
            (text, file, None) => vec![given("", title, text, file)?],
            _ => {
                return Err(ApiError::field(
                    "documents",
                    "give documents without a text or file beside them",
                ));
            }
        };
        Ok(Upload { given, held, stream, method })
    }
}

/// A document of a request, whose fields lie in `place`.
fn given(place: &str, title: String, text: Option<String>, file: Option<FileUpload>) -> Result<Given> {
    let param = |name: &str| if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") };
    match (text, file) {
        (Some(text), None) if text.trim().is_empty() => {
            Err(ApiError::field(&param("text"), "a document has no text"))
        }
        (Some(text), None) => Ok(Given::Document(Document { title, text })),
        (None, Some(FileUpload { name, data })) => {
            Ok(Given::File(File { name, bytes: data, title, param: param("file") }))
        }
        (Some(_), Some(_)) => Err(ApiError::field(&param("file"), "give a text or a file, not both")),
        (None, None) => {
            let message =
                "give a text, a file {name, data}, or documents: a list of {title, text} and {file}";
            Err(ApiError::field(&param("text"), message))
        }
    }
}

impl FileForm {
    async fn read(mut parts: Multipart) -> Result<FileForm> {
        let failed = |error: MultipartError| malformed(error.body_text());
        let mut form = FileForm::default();
        while let Some(part) = parts.next_field().await.map_err(failed)? {
            match part.name().unwrap_or_default() {
                "file" => {
                    let name = part.file_name().unwrap_or_default().to_owned();
                    let data = part.bytes().await.map_err(failed)?.to_vec();
                    form.file.push(FileUpload { name, data });
                }
                "method" => form.method = Some(text_of(part).await?),
                "stream" => {
                    form.stream = text_of(part)
                        .await?
                        .parse()
                        .map_err(|_| ApiError::field("stream", "stream is true or false"))?;
                }
                other => {
                    let message = format!("a form has the parts file, method and stream, not {other:?}");
                    return Err(ApiError::field(other, message));
                }
            }
        }
        Ok(form)
    }

    fn into_upload(self, held: HeldBytes) -> Upload {
        let given = |FileUpload { name, data }| {
            Given::File(File { name, bytes: data, title: String::new(), param: "file".to_owned() })
        };
        let given = self.file.into_iter().map(given).collect();
        Upload { given, held, stream: self.stream, method: self.method.map(Value::String) }
    }
}

async fn text_of(part: Field<'_>) -> Result<String> {
    Ok(part.text().await.map_err(|error| malformed(error.body_text()))?.trim().to_owned())
}

fn malformed(reason: String) -> ApiError {
    let message = format!("the body is not a form: {reason}");
    ApiError { code: Some("invalid_form"), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
}

fn from_base64<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u8>, D::Error> {
    struct Base64;

    impl Visitor<'_> for Base64 {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the bytes of a file in base64")
        }

        fn visit_str<E: Error>(self, text: &str) -> std::result::Result<Vec<u8>, E> {
            STANDARD.decode(text).map_err(|error| E::custom(format!("a file's data is not base64: {error}")))
        }
    }

    deserializer.deserialize_str(Base64)
}
