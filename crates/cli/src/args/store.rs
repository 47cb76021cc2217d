//! Options of `refrain store` and `refrain documents`.

use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "remote")]
use clap::Args;
use clap::{Subcommand, ValueHint};

#[cfg(feature = "remote")]
use crate::examples;
use refrain::quantities::parse_duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Store {
    /// Show the store's size and limits
    Stats,
    /// List the chunks of the own namespace
    Ls {
        /// Chunks of all namespaces
        #[arg(long)]
        all: bool,
    },
    /// Show a chunk and, if its model can be opened, its text
    Show {
        /// Key, or its first digits
        #[arg(value_name = "KEY")]
        key: String,
    },
    /// Remove chunks
    Rm {
        /// Keys, or their first digits
        #[arg(value_name = "KEY", required_unless_present = "all", conflicts_with = "all")]
        keys: Vec<String>,
        /// Remove all chunks, of whatever model
        #[arg(long)]
        all: bool,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Read and verify every file, and remove broken ones
    Verify,
    /// Remove expired chunks, chunks over the limits, and files that interrupted programs have left
    Gc,
    /// Delete chunks of the object store of --remote that no document names and no machine has written for long; without --delete, note
    /// and show them
    #[cfg(feature = "remote")]
    #[command(after_help = examples::STORE_PRUNE)]
    Prune(Prune),
    /// Keep chunks whatever room is needed, and say until when
    Pin {
        /// Keys, or their first digits
        #[arg(value_name = "KEY", required_unless_present = "all", conflicts_with = "all")]
        keys: Vec<String>,
        /// All chunks of the own namespace
        #[arg(long)]
        all: bool,
        /// Let them go again when room is needed
        #[arg(long)]
        remove: bool,
        /// Remove them after this time, such as 12h or 30d, or `never`. Until then they are pinned, unless --remove is given
        #[arg(long, value_name = "TIME", value_parser = parse_keep)]
        keep: Option<Keep>,
    },
    /// Write chunks, with the statistics that methods keep beside them, to an archive
    Export {
        /// File to write; `-` for standard output
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Keys, or their first digits [default: all chunks of the own namespace]
        #[arg(value_name = "KEY")]
        keys: Vec<String>,
        /// The chunks of all namespaces
        #[arg(long, conflicts_with = "keys")]
        all: bool,
    },
    /// Verify and store the chunks of an archive
    Import {
        /// File to read; `-` for standard input
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Keep the namespaces of the archive, instead of storing all chunks in the own namespace
        #[arg(long)]
        namespaces: bool,
    },
}

#[cfg(feature = "remote")]
#[derive(Debug, Args)]
pub(crate) struct Prune {
    /// Chunks that a machine has written within this time stay
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = parse_duration)]
    pub(crate) unused: Duration,
    /// How long a chunk must have been noted before --delete deletes it; it stays if a document names it by then
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    pub(crate) grace: Duration,
    /// Delete the chunks that were noted long enough ago
    #[arg(long)]
    pub(crate) delete: bool,
}

/// How long chunks stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    Never,
    For(Duration),
}

fn parse_keep(text: &str) -> Result<Keep, String> {
    if text == "never" { Ok(Keep::Never) } else { parse_duration(text).map(Keep::For) }
}

/// `refrain documents`
#[derive(Debug, Subcommand)]
pub(crate) enum Kept {
    /// List the documents of the own namespace, with those of the object store that --remote names, to which nothing is sent
    Ls,
    /// Remove documents, and their chunks that no other document has
    Rm {
        /// Ids, or how they begin: doc- and a digit at least
        #[arg(value_name = "ID", required_unless_present = "all", conflicts_with = "all")]
        ids: Vec<String>,
        /// Remove all documents
        #[arg(long)]
        all: bool,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
}
