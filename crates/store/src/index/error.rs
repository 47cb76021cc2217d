//! Errors inside an index transaction.

use std::path::Path;

use crate::{StoreError, damage};

/// An error inside an index transaction.
pub(crate) enum IndexError {
    /// The file is not an index, or a broken one. The reason.
    Broken(String),
    /// The database refused something. The file may be whole.
    Database(redb::Error),
    /// The store's own code failed inside the transaction. The database is whole.
    Store(StoreError),
}

impl IndexError {
    /// The store's error for `action` on the database file `path`.
    pub(super) fn at(self, action: &'static str, path: &Path) -> StoreError {
        let path = path.to_owned();
        match self {
            IndexError::Broken(why) => {
                let remedy = "it is made anew from the chunks if it is removed while no program uses it";
                StoreError::Index { action, path, why: format!("{why}; {remedy}") }
            }
            IndexError::Database(redb::Error::Io(source)) => StoreError::Io { action, path, source },
            IndexError::Database(error) => StoreError::Index { action, path, why: error.to_string() },
            IndexError::Store(error) => error,
        }
    }
}

impl From<StoreError> for IndexError {
    fn from(error: StoreError) -> IndexError {
        IndexError::Store(error)
    }
}

macro_rules! from_redb {
    ($($error:ident),*) => {$(
        impl From<redb::$error> for IndexError {
            fn from(error: redb::$error) -> IndexError {
                damage(error.into()).map_or_else(IndexError::Database, IndexError::Broken)
            }
        }
    )*};
}
from_redb!(StorageError, TableError, TransactionError, CommitError, DatabaseError);

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use redb::{StorageError, TableError};

    use super::*;

    /// A healthy index that the system refuses is not to be removed.
    #[test]
    fn only_a_broken_index_is_said_to_be_made_anew() {
        let said = |error: IndexError| error.at("open", Path::new("/store/index.redb")).to_string();
        let corrupted = || StorageError::Corrupted("a page".to_owned());
        for broken in [corrupted().into(), TableError::Storage(corrupted()).into()].map(said) {
            assert!(broken.contains("index.redb: a page; it is made anew"), "{broken}");
        }
        for (kind, remedy) in [
            (ErrorKind::PermissionDenied, "needs the right to read and write"),
            (ErrorKind::ReadOnlyFilesystem, "where this program can write"),
            (ErrorKind::StorageFull, "make room there"),
        ] {
            let refused = said(StorageError::Io(kind.into()).into());
            assert!(refused.contains(remedy) && !refused.contains("removed"), "{refused}");
        }
    }
}
