//! Options of what an installation needs: completion scripts, manual pages, a check of the server's health.

use std::path::PathBuf;

use clap::{Args, ValueHint};

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// Folder to write into; made if it is missing
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) folder: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Health {
    /// Address of the server [default: http://127.0.0.1 and --port]
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) url: Option<String>,
    /// Port of a server on this machine, where no URL is given; REFRAIN_PORT means the same to `refrain serve`
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub(crate) port: u16,
}
