//! Documents that are kept: stored with their chunks by namespace, and found by the words of a question.
//!
//! [`Library`] keeps and searches the documents of one engine. [`Corpus`] is below it, for servers: documents of many namespaces, with
//! pins, quotas and removals that leave no byte behind. [`SourceFinder`] gives documents as the chunks of a prompt.

mod corpus;
mod cut;
mod database;
mod error;
mod library;
mod migration;
mod purge;
mod search;
mod sources;
mod store;
mod tables;

pub use corpus::Corpus;
pub use cut::NewDocument;
pub use error::{Error, Result};
pub use library::{Found, Library};
pub use search::Hit;
pub use sources::{Source, SourceChunk, SourceFinder};
pub use store::DocumentStore;
pub use tables::{StoredDocument, document_id};
