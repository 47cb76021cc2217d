//! Documents that are kept: stored with their chunks by namespace, and found by the words of a question.
//!
//! [`Library`] keeps and searches the documents of one engine. [`Corpus`] is below it, for servers: documents of many namespaces, with
//! pins, quotas and removals that leave no byte behind. [`SourceFinder`] gives documents as the chunks of a prompt.
//!
//! A [`DocumentStore`] keeps the documents: [`LocalDocuments`] on this machine alone, [`SharedDocuments`] on all that share an object
//! store.

#[cfg(test)]
mod conformance;
mod corpus;
mod cut;
mod database;
mod document_store;
mod error;
mod library;
mod local;
mod migration;
#[cfg(test)]
#[path = "../../../tests/common/needs.rs"]
mod needs;
mod notes;
mod open;
mod pins;
mod purge;
mod removals;
#[cfg(feature = "remote")]
mod replica;
mod search;
#[cfg(feature = "remote")]
mod shared;
mod sources;
mod sync_thread;
mod tables;

pub use corpus::Corpus;
pub use cut::{NewDocument, tokenizer_digest};
pub use document_store::{Applied, Change, ChangeKind, DocumentStore, KeysOf, Removal, SharingStats};
pub use error::{Error, Result};
pub use library::{Found, Library};
pub use local::LocalDocuments;
pub use open::open_documents;
pub use search::Hit;
#[cfg(feature = "remote")]
pub use shared::{Collector, GarbageOptions, GarbageReport, SharedDocuments, check_shareable};
pub use sources::{Source, SourceChunk, SourceFinder};
pub use sync_thread::SyncThread;
pub use tables::{StoredDocument, document_id};
