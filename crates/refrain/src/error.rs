/// Errors of opening a model and answering with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine: model, store, method, policy or request.
    #[error(transparent)]
    Engine(#[from] refrain_engine::Error),
    /// A method or a policy, by its text.
    #[error(transparent)]
    Method(#[from] refrain_registry::Error),
    /// Documents that are kept: they cannot be opened, stored or searched.
    #[error(transparent)]
    Corpus(#[from] refrain_corpus::Error),
    /// A name that is neither known nor a file, folder or address.
    #[error("there is no model '{name}': it is no file or folder, and no known name")]
    UnknownModel {
        /// The name.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// A known model, or one of the hub, that was not fetched yet.
    #[error("the model '{name}' is not in {place}")]
    NotFetched {
        /// The name.
        name: String,
        /// The folder or cache that it would be in.
        place: String,
    },
    /// A name that begins as an address of the Hugging Face hub does, and is none.
    #[error("'{name}' {reason}")]
    Address {
        /// The name.
        name: String,
        /// The fault.
        reason: &'static str,
    },
    /// A built-in method or prefix that cannot be read.
    #[error("{0}")]
    Choice(String),
    /// A home folder that is not known.
    #[error("the home folder is not known, so that {what} is not either")]
    Home {
        /// The folder that lies in it.
        what: &'static str,
    },
    /// A file of `refrain calibrate` or `refrain tune` that cannot be written or used.
    #[error("cannot {action} {file}: {reason}")]
    Kept {
        /// What cannot be done with it.
        action: &'static str,
        /// The file.
        file: String,
        /// The fault.
        reason: String,
    },
}

impl Error {
    /// The remedy, where one is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::UnknownModel { known, .. } => {
                Some(format!("known names are {known}; others are paths or hf:ORG/NAME"))
            }
            Error::NotFetched { name, .. } => Some(format!("run: refrain pull {name}")),
            Error::Engine(refrain_engine::Error::Device { .. }) => {
                Some("--device cpu needs neither a GPU nor a driver".to_owned())
            }
            Error::Home { .. } => Some("give the folder".to_owned()),
            _ => None,
        }
    }
}

impl From<refrain_store::StoreError> for Error {
    fn from(error: refrain_store::StoreError) -> Error {
        Error::Engine(error.into())
    }
}

impl From<refrain_model::ModelError> for Error {
    fn from(error: refrain_model::ModelError) -> Error {
        Error::Engine(error.into())
    }
}

/// The result of opening a model or answering with it.
pub type Result<T, E = Error> = std::result::Result<T, E>;
