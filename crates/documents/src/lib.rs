//! Documents as people have them, read as structured text and cut by structure.
//!
//! [`read`] turns the bytes of one file into documents, [`read_path`] a file or a folder of them. Headings, lists, tables and
//! paragraphs of HTML, DOCX and PDF become those of Markdown. [`split()`] cuts such a text into pieces that fit a size, along
//! its headings, paragraphs and sentences.
//!
//! The bytes are not trusted: a damaged or hostile file gives an error, never a panic, within the [`limits`].

mod document;
mod docx;
mod error;
mod html;
pub mod limits;
mod markdown;
mod origin;
mod pdf;
mod reader;
mod split;
mod text;

pub use document::Document;
pub use error::ReadError;
pub use reader::{Failure, Files, Reading, files, read, read_holding, read_path};
pub use split::{Piece, split};
